"""Measures the cost of a weight update for running samples: ``python -m benchmarks.publish_update``.

Long samples run on a real SGLang server on the CPU, with and without updates, for each value of
``rollout_fleet.sglang.on_update``. The cost of one update is the time by which it delays the end of the last sample.
This time includes the pause, and the computation that the server repeats after the pause. The last line of the output
is JSON.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from asyncrl.core.types import WeightOffer
from benchmarks.publish import save_model
from benchmarks.report import Target, print_report
from benchmarks.saved_weights import describe_model
from rollout_fleet.config import EngineDevice, OnUpdate, RolloutFleetConfig, SamplingConfig, SGLangConfig
from rollout_fleet.engines.engine import SampleRequest
from rollout_fleet.engines.sglang import SGLangEngine

NUM_SAMPLES, NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 8, 256, 64
NUM_UPDATES, NUM_RUNS = 2, 3
TARGETS = {f"update_s_{mode}": Target() for mode in OnUpdate}


async def measure(on_update: OnUpdate, model_path: str, offer: WeightOffer, scratch: Path) -> dict[str, float]:
    """Return a dictionary with one figure: the median delay of running samples by one weight update, in seconds.

    ``on_update`` says what the engine does with the KV cache of running samples. ``offer`` announces the weights.
    """
    config = RolloutFleetConfig(sglang=SGLangConfig(dtype="float32", max_total_tokens=8192, on_update=on_update))
    engine = SGLangEngine(config, model_path=model_path, device=EngineDevice.cpu, rank=0, log_dir=str(scratch), seed=0)
    await engine.start()
    try:
        costs = []
        await _run(engine, -1, offer, 1)  # Warm up the engine before the measurement.
        for run in range(NUM_RUNS):
            undisturbed_s = await _run(engine, 2 * run, offer, 0)
            updated_s = await _run(engine, 2 * run + 1, offer, NUM_UPDATES)
            costs.append((updated_s - undisturbed_s) / NUM_UPDATES)
    finally:
        await engine.stop()
    return {f"update_s_{on_update}": statistics.median(costs)}


async def _run(engine: SGLangEngine, run: int, offer: WeightOffer, num_updates: int) -> float:
    """Generate samples, and load the weights of ``offer`` into the engine ``num_updates`` times during the generation.

    Each load waits until the engine has sampled one more token. Return the seconds until the last sample ends.
    """
    rng = np.random.default_rng(run + 1)
    options = SamplingConfig(max_new_tokens=NUM_NEW_TOKENS)
    requests = [
        SampleRequest(id=f"{run}-{i}", prompt_ids=rng.integers(3, 1000, NUM_PROMPT_TOKENS, np.int32), sampling=options)
        for i in range(NUM_SAMPLES)
    ]
    writing, token = asyncio.Event(), engine.silence.token

    def heard() -> None:
        writing.set()
        token()

    async def sample() -> None:
        async for _ in engine.generate(requests):
            pass

    engine.silence.token = heard  # type: ignore[method-assign]
    began_s = time.perf_counter()
    running = asyncio.create_task(sample())
    for _ in range(num_updates):
        writing.clear()
        await asyncio.wait_for(writing.wait(), 120)
        await engine.load_weights(offer)
    await running
    engine.silence.token = token  # type: ignore[method-assign]
    return time.perf_counter() - began_s


def main() -> None:
    """Measure weight updates with every value of ``on_update``, and print the figures."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="asyncrl-bench-") as folder:
        scratch = Path(folder)
        model_path = save_model(scratch / "model")
        offer = describe_model(model_path).offer(scratch / "manifest.json", 1)
        figures: dict[str, float] = {}
        for on_update in OnUpdate:
            figures |= asyncio.run(measure(on_update, model_path, offer, scratch))
    title = f"{NUM_SAMPLES} samples of {NUM_PROMPT_TOKENS} prompt and {NUM_NEW_TOKENS} new tokens, a model of 340 MB"
    print_report(title, {}, figures, TARGETS, baseline="the same samples without an update")


if __name__ == "__main__":
    main()
