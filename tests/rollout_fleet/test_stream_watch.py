"""When one stream of an engine counts as stalled, and what becomes of its samples."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from asyncrl.core.errors import DeadlineError
from rollout_fleet.engines.engine import EngineLoad
from rollout_fleet.engines.stream_watch import Stream, StreamWatch, beyond_queue

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("virtual_time")]
TIMEOUT_S = 8.0


class Streams:
    """Streams that a watch sees: those that write are heard every second, and end where they are aborted."""

    def __init__(self, *, num_waiting=0, hears_aborts=True, most=3):
        self.num_waiting, self.hears_aborts = num_waiting, hears_aborts
        self.aborted, self.stalled = [], []
        self.readers = []
        self.watch = StreamWatch(
            "sglang-0",
            timeout_s=TIMEOUT_S,
            read_load=self.read_load,
            abort=self.abort,
            most=most,
            window_s=100.0,
            on_stalled=self.stalled.append,
        )

    async def read_load(self):
        if self.num_waiting is None:
            await asyncio.Event().wait()
        return EngineLoad(num_running=0, num_waiting=self.num_waiting, cache_use=0.0)

    async def abort(self, ids):
        self.aborted.append(ids)
        if self.hears_aborts:
            for reader in self.readers:
                if reader.get_name() in ids:
                    reader.cancel()

    def open(self, name, *, writes_for_s=0.0):
        """Read a stream that is heard for so long, and then no more."""

        async def read():
            stream = Stream(unanswered={name}, reader=asyncio.current_task())
            with self.watch.reading(stream):
                for _ in range(int(writes_for_s)):
                    await asyncio.sleep(1.0)
                    self.watch.heard(stream)
                await asyncio.Event().wait()

        self.readers.append(asyncio.create_task(read(), name=name))

    @asynccontextmanager
    async def watching(self):
        waiting = asyncio.create_task(self.watch.wait())
        try:
            yield waiting
        finally:
            for task in (waiting, *self.readers):
                task.cancel()
            await asyncio.gather(waiting, *self.readers, return_exceptions=True)


async def test_a_stream_that_stalls_beside_a_live_one_is_cut_off():
    streams = Streams(hears_aborts=False)
    streams.open("live", writes_for_s=100)
    streams.open("stalled", writes_for_s=3)
    async with streams.watching() as waiting:
        await asyncio.sleep(3 + 0.9 * TIMEOUT_S)
        assert streams.aborted == []
        await asyncio.sleep(0.5 * TIMEOUT_S)
        assert (streams.aborted, len(streams.stalled)) == ([{"stalled"}], 1)
        assert "nothing came of it within rollout_fleet.silence_timeout_s = 8 s" in streams.stalled[0]
        assert [reader.done() for reader in streams.readers] == [False, True]
        assert not waiting.done(), "one stalled stream is no failure of its engine"


async def test_a_stream_that_ends_when_it_is_aborted_has_not_stalled():
    streams = Streams()
    streams.open("live", writes_for_s=100)
    streams.open("slow")
    async with streams.watching():
        await asyncio.sleep(1.5 * TIMEOUT_S)
        assert (streams.aborted, streams.stalled) == ([{"slow"}], [])


async def test_samples_that_wait_in_the_engine_are_silent_with_right_until_they_no_longer_do():
    streams = Streams(num_waiting=1, hears_aborts=False)
    streams.open("live", writes_for_s=200)
    streams.open("waits")
    async with streams.watching():
        await asyncio.sleep(5 * TIMEOUT_S)
        assert streams.aborted == []
        streams.num_waiting = 0
        await asyncio.sleep(TIMEOUT_S)
        assert streams.aborted == [{"waits"}]


async def test_a_pause_is_no_stall_and_gives_every_stream_the_whole_deadline_again():
    streams = Streams()
    streams.open("live", writes_for_s=100)
    streams.open("other")
    async with streams.watching():
        await asyncio.sleep(0.5 * TIMEOUT_S)
        with streams.watch.paused():
            await asyncio.sleep(5 * TIMEOUT_S)
        await asyncio.sleep(0.9 * TIMEOUT_S)
        assert streams.aborted == []
        await asyncio.sleep(0.3 * TIMEOUT_S)
        assert streams.aborted == [{"other"}]


async def test_where_nothing_comes_of_any_stream_the_engine_is_silent_and_no_stream_is_cut_off():
    streams = Streams()
    streams.open("one", writes_for_s=2)
    streams.open("other", writes_for_s=3)
    async with streams.watching():
        await asyncio.sleep(10 * TIMEOUT_S)
        streams.open("new, and never heard")
        await asyncio.sleep(2 * TIMEOUT_S)
        assert streams.aborted == []


async def test_an_engine_whose_streams_stall_again_and_again_has_failed():
    streams = Streams(hears_aborts=False, most=2)
    streams.open("live", writes_for_s=1000)
    streams.open("stalled")
    async with streams.watching() as waiting:
        await asyncio.sleep(120)  # the first no longer counts
        assert len(streams.stalled) == 1
        streams.open("stalled later")
        await asyncio.sleep(2 * TIMEOUT_S)
        assert not waiting.done()
        streams.open("and another")
        with pytest.raises(DeadlineError, match=r"2 streams of sglang-0 stalled within .*restart_window_s = 100 s"):
            await asyncio.wait_for(waiting, 2 * TIMEOUT_S)


async def test_an_engine_that_does_not_say_its_load_beside_a_silent_stream_has_failed():
    streams = Streams(num_waiting=None)
    streams.open("live", writes_for_s=100)
    streams.open("silent")
    async with streams.watching() as waiting:
        with pytest.raises(DeadlineError, match=r"1 of its 2 streams nothing .* did not say its load within 2 s"):
            await asyncio.wait_for(waiting, 2 * TIMEOUT_S)


@pytest.mark.parametrize(("num_waiting", "left"), [(0, 3), (2, 3), (3, 2), (4, 2), (5, 1), (8, 1), (9, 0), (99, 0)])
async def test_so_many_silent_samples_are_excused_as_wait_in_the_engine_those_sent_last_first(num_waiting, left):
    reader = asyncio.current_task()
    streams = [Stream(unanswered=set(map(str, range(size))), reader=reader) for size in (4, 2, 3)]
    assert beyond_queue(streams, num_waiting) == streams[:left]
