"""Guarded tasks in workflows: a duplicate never leaves a workflow waiting, whatever its place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError

from celery_guard import DuplicateTask
from tests.services.stage import Stage

pytestmark = pytest.mark.xdist_group("canvas")


@pytest.fixture(scope="module")
def running() -> Iterator[Stage]:
    with Stage() as stage:
        stage.worker(concurrency=4)
        yield stage


@pytest.fixture
def stage(running: Stage) -> Stage:
    running.clear()
    return running


@pytest.fixture
def held(stage: Stage) -> Iterator[str]:
    """A label whose claim is held by a running task for the length of the test."""
    label = stage.label()
    holder = stage.task("executed").delay(label, "hold")
    stage.started(label)
    yield label
    stage.let_go(label)
    assert stage.get(holder) == label


def test_duplicates_in_a_chord_header(stage):
    """A chord with equal members completes: its body runs once, with a value for each member (R107)."""
    label, other, last = stage.label(), stage.label(), stage.label()
    task = stage.task("executed")
    result = chord([task.s(label), task.s(label), task.s(other)], stage.task("all_arguments").s("ok", last))()
    assert stage.get(result) == str([label, label, other])
    assert stage.runs(str([label, label, other])) == 1
    stage.wait_free()


@pytest.mark.parametrize("task", ["executed", "executing", "both"])
def test_chain_of_one_key(stage, task):
    """Each link gives the claim back before the next is sent: a chain of equal calls runs them all."""
    label = stage.label()
    signature = stage.task(task).si(label)
    assert stage.get(chain(signature, signature, signature).apply_async()) == label
    stage.wait_free()
    assert stage.runs(label) == 3


def test_group_of_one_key(stage):
    """Every member of a group has a result of its own."""
    label = stage.label()
    assert stage.get(group(stage.task("executed").s(label, "sleep:0.2") for _ in range(3)).apply_async()) == [label] * 3
    stage.wait_free()


@pytest.mark.parametrize(
    "shape", ["last of a chain", "first of a chain", "middle of a chain", "group", "header", "body", "nested", "link", "link_error", "chord in a chain"]
)
def test_workflow_with_a_duplicate_completes(stage, held, shape):
    """The key is held by a task that runs: the workflow that carries a duplicate of it completes all the same, wherever the duplicate is."""
    duplicate, plain = stage.task("executed").si(held), stage.task("plain")
    end, start = stage.label(), stage.label()
    workflow = {
        "last of a chain": chain(plain.si(start), duplicate),
        "first of a chain": chain(duplicate, plain.si(end)),
        "middle of a chain": chain(plain.si(start), duplicate, plain.si(end)),
        "group": group(duplicate, plain.si(start)),
        "header": chord([duplicate, plain.si(start)], plain.si(end)),
        "body": chord([plain.si(start), plain.si(end)], duplicate),
        "nested": chain(plain.si(start), group(chain(duplicate, plain.si(end)), duplicate), plain.si(end)),
        "link": duplicate.clone().set(link=plain.si(end)),
        "link_error": duplicate.clone().set(link_error=plain.si(end)),
        "chord in a chain": chain(plain.si(start), chord([duplicate, duplicate], duplicate), plain.si(end)),
    }[shape]
    value = stage.get(workflow.apply_async())
    assert value == {"group": [held, start]}.get(shape, held if shape in {"last of a chain", "body", "link", "link_error"} else end)
    if shape == "link":
        stage.started(end)
    claim = stage.claim("executed", held)
    assert claim is not None


def test_holder_keeps_the_claim_while_a_continuing_duplicate_ends(stage, held):
    """The duplicate that had to run for its workflow's sake goes without a claim: it neither takes nor frees the holder's."""
    before = stage.claim("executed", held)
    result = chain(stage.task("executed").si(held), stage.task("plain").si(stage.label())).apply_async()
    stage.get(result)
    after = stage.claim("executed", held)
    assert before is not None
    assert after is not None
    assert (after.owner, after.task_id) == (before.owner, before.task_id)
    assert stage.task("executed").delay(held).duplicate is True


def test_link_that_is_a_duplicate_completes(stage, held):
    """A guarded callback whose key is held does not fail the task that calls it."""
    label = stage.label()
    result = stage.task("plain").apply_async((label,), link=stage.task("executed").si(held))
    assert stage.get(result) == label
    assert result.state == "SUCCESS"


def test_raising_duplicate_in_a_workflow_sends_nothing(stage):
    """on_conflict="raise": the dispatch of a workflow whose first task is a duplicate raises, and nothing of it runs."""
    label, end = stage.label(), stage.label()
    holder = stage.task("raising").delay(label, "hold")
    stage.started(label)
    with pytest.raises(DuplicateTask) as raised:
        chain(stage.task("raising").si(label), stage.task("plain").si(end)).apply_async()
    assert (raised.value.task_id, raised.value.state) == (holder.id, "running")
    stage.let_go(label)
    assert stage.get(holder) == label
    stage.drained()
    assert stage.runs(end) == 0


def test_key_is_made_when_the_call_is_complete(stage):
    """A chain's second task gets its first argument from the first: the key is made of it, not of what stood in the signature (R116)."""
    label = stage.label()
    result = chain(stage.task("plain").s(label), stage.task("executed").s("hold")).apply_async()
    stage.started(label, 2)
    claim = stage.claim("executed", label)
    assert claim is not None
    assert claim.task_id == result.id
    stage.let_go(label)
    assert stage.get(result) == label
    stage.wait_free()


def test_retry_in_a_chain(stage):
    """A link that retries twice does not break get(), and its successor runs once (R112)."""
    label, end = stage.label(), stage.label()
    result = chain(stage.task("both").si(label, "retry:2"), stage.task("plain").si(end)).apply_async()
    assert stage.get(result) == end
    stage.wait_free()
    assert (stage.runs(label), stage.runs(end)) == (3, 1)


@pytest.mark.parametrize("how", ["retry:1", "replace:same", "replace:other", "replace:chord", "flaky:1"])
def test_chord_members_that_go_on_under_their_id(stage, how):
    """Members that retry or are replaced count once: the chord's body runs once, with their values."""
    label, other, end = stage.label(), stage.label(), stage.label()
    result = chord([stage.task("executed").s(label, how), stage.task("executed").s(other)], stage.task("plain").si(end))()
    assert stage.get(result) == end
    stage.wait_free()
    stage.drained()
    assert stage.runs(end) == 1


def test_postponed_members_of_a_chord(stage):
    """Three members that exclude each other run one after the other, and the body runs once."""
    label, end = stage.label(), stage.label()
    result = chord([stage.task("locked").s(label, "sleep:0.2") for _ in range(3)], stage.task("plain").si(end))()
    assert stage.get(result) == end
    stage.wait_free()
    stage.drained()
    assert (stage.runs(label), stage.runs(end)) == (3, 1)
    assert stage.most_at_once(label) == 1


def test_postponed_link_of_a_chain_and_callbacks(stage):
    """A postponement keeps the chain and the callbacks."""
    label, end, linked = stage.label(), stage.label(), stage.label()
    holder = stage.task("locked").delay(label, "hold")
    stage.started(label)
    result = chain(stage.task("locked").si(label).set(link=stage.task("plain").si(linked)), stage.task("plain").si(end)).apply_async()
    stage.told("postponed_overlap", result.parent)
    stage.let_go(label)
    assert stage.get(result) == end
    assert stage.get(holder) == label
    stage.started(linked)
    stage.drained()
    assert (stage.runs(end), stage.runs(linked)) == (1, 1)


def test_skipped_member_fails_its_chord_clearly(stage):
    """on_conflict="skip" at execution: the member ends as REVOKED, and the chord fails with an error that says so, instead of waiting for ever (R107)."""
    label, end = stage.label(), stage.label()
    holder = stage.task("lock_skip").delay(label, "hold")
    stage.started(label)
    result = chord([stage.task("lock_skip").s(label, "ok").set(guard=False), stage.task("plain").si(end)], stage.task("plain").si(end))()
    stage.state(result, "FAILURE")
    assert isinstance(result.result, ChordError)
    assert "is held by task" in str(result.result)
    with pytest.raises(TaskRevokedError, match="is held by task"):  # get() looks at the header first
        stage.get(result)
    stage.let_go(label)
    stage.get(holder)
    assert stage.runs(label) == 1


def test_skipped_link_ends_its_chain(stage):
    """The same in a chain: whoever waits for the last task is told that an earlier one was skipped."""
    label, end = stage.label(), stage.label()
    holder = stage.task("lock_skip").delay(label, "hold")
    stage.started(label)
    result = chain(stage.task("lock_skip").si(label, "ok").set(guard=False), stage.task("plain").si(end)).apply_async()
    with pytest.raises(TaskRevokedError, match="lock"):
        stage.get(result)
    stage.let_go(label)
    stage.get(holder)
    assert stage.runs(end) == 0


@pytest.mark.parametrize("kind", ["map", "starmap", "chunks"])
def test_map_starmap_and_chunks(stage, kind):
    """Tasks that Celery calls like functions inside of one of its own run unguarded, and leave nothing behind."""
    labels = [stage.label() for _ in range(3)]
    task = stage.task("all_arguments")
    if kind == "map":
        assert stage.get(task.map(labels).apply_async()) == labels
    elif kind == "starmap":
        assert stage.get(task.starmap([(label, "ok") for label in labels]).apply_async()) == labels
    else:
        assert stage.get(task.chunks([(label, "ok") for label in labels], 2).apply_async()) == [labels[:2], labels[2:]]
    stage.wait_free()
    assert [stage.runs(label) for label in labels] == [1, 1, 1]


def test_errback_of_a_replaced_task_and_a_guarded_errback(stage):
    """An errback is called once when the replacement fails; it may itself be guarded (R111)."""
    label, errback = stage.label(), stage.label()
    result = stage.task("executed").apply_async((label, "error"), link_error=stage.task("executed").si(errback))
    stage.state(result, "FAILURE")
    stage.started(errback)
    stage.drained()
    stage.wait_free()
    assert stage.runs(errback) == 1


def test_headers_copied_to_another_task_carry_no_claim(stage):
    """A task that passes its own request.headers on to another dispatch does not pass its claim on with them."""
    label = stage.label()
    result = stage.task("executed").delay(label, "copy_headers")
    other = stage.app.AsyncResult(stage.get(result))
    assert other.id != result.id
    assert stage.get(other) == f"{label}-other"
    stage.wait_free()


def test_same_key_from_within_the_run_is_a_duplicate(stage):
    """A task that dispatches itself with its own key while it runs gets itself as the holder."""
    label = stage.label()
    result = stage.task("executed").delay(label, "child")
    assert stage.get(result) == result.id
    stage.wait_free()
    assert stage.runs(label) == 1
