"""Steering a run from outside: stops that cut waits short, questions that are answered once."""

from __future__ import annotations

import asyncio

import pytest

from hermes.runs.control import Questions, RunControls, Stop, Stopped
from support.waiting import DEADLINE_S, idle


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


# ---- stopping


def test_first_stop_reason_wins() -> None:
    stop = Stop()
    stop.request("client_disconnected", by="user")
    stop.request("server_shutdown", by="system")
    assert (stop.reason, stop.by) == ("client_disconnected", "user")


async def test_stop_cancels_wait() -> None:
    stop = Stop()

    async def work() -> str:
        try:
            async with stop.scope():
                await forever()
        except Stopped:
            await idle()
            return "stopped"
        return "done"

    task = asyncio.create_task(work())
    await idle()
    stop.request("stop")
    assert await asyncio.wait_for(task, DEADLINE_S) == "stopped"
    assert task.cancelling() == 0


async def test_stop_scope_after_stop_raises() -> None:
    stop = Stop()
    stop.request("stop")
    with pytest.raises(Stopped):
        async with stop.scope():
            raise AssertionError("it must not be entered")


async def test_stop_after_scope_does_not_interrupt() -> None:
    stop = Stop()
    async with stop.scope():
        await idle()
    stop.request("stop")
    await idle()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    assert stop.reason == "stop"


async def test_stop_cancels_all_waits_of_run() -> None:
    stop = Stop()

    async def work() -> bool:
        try:
            async with stop.scope():
                await forever()
        except Stopped:
            return True
        return False

    tasks = [asyncio.create_task(work()) for _ in range(3)]
    await idle()
    stop.request("stop")
    assert await asyncio.gather(*tasks) == [True, True, True]


async def test_stop_scopes_can_be_nested() -> None:
    stop = Stop()
    texts: list[str] = []

    async def work() -> None:
        try:
            async with stop.scope():
                try:
                    async with stop.scope():
                        await forever()
                finally:
                    texts.append("inner")
        except Stopped:
            texts.append("outer")
        await idle()
        texts.append("after")

    task = asyncio.create_task(work())
    await idle()
    stop.request("stop")
    await asyncio.wait_for(task, DEADLINE_S)
    assert texts == ["inner", "outer", "after"]


async def test_task_cancellation_passes_through_stop_scope() -> None:
    stop = Stop()

    async def work() -> None:
        async with stop.scope():
            await forever()

    task = asyncio.create_task(work())
    await idle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_task_cancellation_wins_over_concurrent_stop() -> None:
    stop = Stop()

    async def work() -> None:
        async with stop.scope():
            await forever()

    task = asyncio.create_task(work())
    await idle()
    task.cancel()
    stop.request("stop")
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_exception_during_stop_is_not_hidden() -> None:
    stop = Stop()

    async def work() -> None:
        async with stop.scope():
            try:
                await forever()
            finally:
                raise ValueError("on the way out")

    task = asyncio.create_task(work())
    await idle()
    stop.request("stop")
    with pytest.raises(ValueError, match="on the way out"):
        await task


async def test_run_can_stop_itself() -> None:
    stop = Stop()

    async def work() -> str:
        try:
            async with stop.scope():
                stop.request("stop")
        except Stopped:
            pass
        # What follows a stop, such as closing the turn, must not be cancelled any more.
        await idle()
        return "closed"

    assert await asyncio.wait_for(asyncio.create_task(work()), DEADLINE_S) == "closed"


# ---- questions


async def test_question_is_answered_once() -> None:
    questions = Questions()
    future = questions.ask("q1")
    assert questions.answer("q1", {"choice": "once"})
    assert not questions.answer("q1", {"choice": "deny"})
    assert await future == {"choice": "once"}
    assert not questions.answer("q1", {})


async def test_unknown_question_is_not_answered() -> None:
    questions = Questions()
    assert not questions.answer("q1", {})
    assert not questions.answer(None, {})


async def test_answer_without_id_answers_oldest_question() -> None:
    questions = Questions()
    first, second = questions.ask("q1"), questions.ask("q2")
    assert questions.answer(None, {"n": 1})
    assert questions.answer(None, {"n": 2})
    assert (await first, await second) == ({"n": 1}, {"n": 2})
    assert not questions.answer(None, {"n": 3})


async def test_cancelled_question_cannot_be_answered() -> None:
    questions = Questions()
    future = questions.ask("q1")
    future.cancel()
    assert not questions.answer("q1", {})
    assert not questions.answer(None, {})


async def test_question_id_can_be_reused() -> None:
    questions = Questions()
    questions.ask("q1").cancel()
    again = questions.ask("q1")
    await idle()
    assert questions.answer("q1", {"n": 1})
    assert await again == {"n": 1}


async def test_expected_question_can_be_answered_before_it_is_asked_again() -> None:
    questions = Questions()
    questions.expect(["q1", "q2"])
    assert not questions.answer(None, {"n": 0}) and not questions.answer("q3", {"n": 0})
    assert questions.answer("q1", {"n": 1})
    assert not questions.answer("q1", {"n": 2}), "the first answer counts"
    assert await questions.ask("q1") == {"n": 1}
    assert not questions.answer("q1", {"n": 3})
    later = questions.ask("q2")
    assert not later.done() and questions.answer("q2", {"n": 4})


async def test_run_controls_are_independent() -> None:
    first, two = RunControls(), RunControls()
    first.stop.request("stop")
    first.steers.append(("s1", "faster"))
    first.approvals.ask("a")
    assert two.stop.reason is None and two.steers == [] and not two.approvals.answer("a", {})
    assert not first.clarifications.answer("a", {})
