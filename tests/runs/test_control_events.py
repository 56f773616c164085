"""Steering a run from outside: stops that cut waits short, questions that are answered once."""

from __future__ import annotations

import asyncio

import pytest

from hermes.runs.control import Questions, RunControls, Stop, Stopped


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


# ---- stopping


def test_the_first_reason_stands() -> None:
    stop = Stop()
    stop.request("client_disconnected", by="user")
    stop.request("server_shutdown", by="system")
    assert (stop.reason, stop.by) == ("client_disconnected", "user")


async def test_a_stop_cuts_a_wait_short() -> None:
    stop = Stop()

    async def work() -> str:
        try:
            async with stop.scope():
                await forever()
        except Stopped:
            await asyncio.sleep(0)
            return "stopped"
        return "done"

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    stop.request("stop")
    assert await asyncio.wait_for(task, 2) == "stopped"
    assert task.cancelling() == 0


async def test_a_scope_does_not_begin_after_a_stop() -> None:
    stop = Stop()
    stop.request("stop")
    with pytest.raises(Stopped):
        async with stop.scope():
            raise AssertionError("it must not be entered")


async def test_work_that_is_not_stopped_comes_to_its_end() -> None:
    stop = Stop()
    async with stop.scope():
        await asyncio.sleep(0)
    stop.request("stop")
    await asyncio.sleep(0)


async def test_several_waits_of_a_run_are_all_cut_short() -> None:
    stop = Stop()

    async def work() -> bool:
        try:
            async with stop.scope():
                await forever()
        except Stopped:
            return True
        return False

    tasks = [asyncio.create_task(work()) for _ in range(3)]
    await asyncio.sleep(0)
    stop.request("stop")
    assert await asyncio.gather(*tasks) == [True, True, True]


async def test_scopes_may_lie_in_each_other() -> None:
    stop = Stop()
    seen: list[str] = []

    async def work() -> None:
        try:
            async with stop.scope():
                try:
                    async with stop.scope():
                        await forever()
                finally:
                    seen.append("inner")
        except Stopped:
            seen.append("outer")
        await asyncio.sleep(0)
        seen.append("after")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    stop.request("stop")
    await asyncio.wait_for(task, 2)
    assert seen == ["inner", "outer", "after"]


async def test_cancelling_the_task_still_cancels_it() -> None:
    stop = Stop()

    async def work() -> None:
        async with stop.scope():
            await forever()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_wins_over_a_stop_at_the_same_time() -> None:
    stop = Stop()

    async def work() -> None:
        async with stop.scope():
            await forever()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    stop.request("stop")
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_on_the_way_out_is_not_hidden() -> None:
    stop = Stop()

    async def work() -> None:
        async with stop.scope():
            try:
                await forever()
            finally:
                raise ValueError("on the way out")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    stop.request("stop")
    with pytest.raises(ValueError, match="on the way out"):
        await task


async def test_a_run_may_ask_for_its_own_stop() -> None:
    stop = Stop()

    async def work() -> str:
        try:
            async with stop.scope():
                stop.request("stop")
        except Stopped:
            pass
        # What follows a stop, such as closing the turn, must not be cancelled any more.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return "closed"

    assert await asyncio.wait_for(asyncio.create_task(work()), 2) == "closed"


# ---- questions


async def test_an_answer_fills_its_question_once() -> None:
    questions = Questions()
    future = questions.ask("q1")
    assert questions.answer("q1", {"choice": "once"})
    assert not questions.answer("q1", {"choice": "deny"})
    assert await future == {"choice": "once"}
    assert not questions.answer("q1", {})


async def test_an_unknown_question_is_not_answered() -> None:
    questions = Questions()
    assert not questions.answer("q1", {})
    assert not questions.answer(None, {})


async def test_without_an_id_the_oldest_open_question_is_answered() -> None:
    questions = Questions()
    first, second = questions.ask("q1"), questions.ask("q2")
    assert questions.answer(None, {"n": 1})
    assert questions.answer(None, {"n": 2})
    assert (await first, await second) == ({"n": 1}, {"n": 2})
    assert not questions.answer(None, {"n": 3})


async def test_a_question_nobody_waits_for_any_more_is_closed() -> None:
    questions = Questions()
    future = questions.ask("q1")
    future.cancel()
    assert not questions.answer("q1", {})
    assert not questions.answer(None, {})


async def test_a_question_may_be_asked_again_under_its_id() -> None:
    questions = Questions()
    questions.ask("q1").cancel()
    again = questions.ask("q1")
    await asyncio.sleep(0)
    assert questions.answer("q1", {"n": 1})
    assert await again == {"n": 1}


async def test_a_question_that_will_be_asked_again_may_be_answered_before_that() -> None:
    questions = Questions()
    questions.expect(["q1", "q2"])
    assert not questions.answer(None, {"n": 0}) and not questions.answer("q3", {"n": 0})
    assert questions.answer("q1", {"n": 1})
    assert not questions.answer("q1", {"n": 2}), "the first answer counts"
    assert await questions.ask("q1") == {"n": 1}
    assert not questions.answer("q1", {"n": 3})
    later = questions.ask("q2")
    assert not later.done() and questions.answer("q2", {"n": 4})


async def test_the_controls_of_runs_are_their_own() -> None:
    one, two = RunControls(), RunControls()
    one.stop.request("stop")
    one.steers.append(("s1", "faster"))
    one.approvals.ask("a")
    assert two.stop.reason is None and two.steers == [] and not two.approvals.answer("a", {})
    assert not one.clarifications.answer("a", {})
