"""A per-request `seed` must not kill a CPU engine.

vLLM 0.32.0 rewinds the generator of every seeded row whose sample it discards (a prompt cut by chunked prefill) with
`Generator.set_offset`, which CPU generators do not have: the engine dies ("CPU Generator does not use offset").
The guard saves the state of those generators before sampling, restores it after, and hides them from the rewind: the
same effect as on CUDA, where a discarded sample costs no randomness.
"""

from __future__ import annotations

from typing import Any


def install_seed_guard() -> None:
    """Patch vLLM's model runner in this (worker) process. Idempotent; does nothing for devices other than CPU."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner, "tetri_seed_guard", False):
        return
    sample, bookkeep = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync

    def guarded_sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        saved = [(generator, generator.get_state()) for generator in _discarded(self).values()]
        output = sample(self, *args, **kwargs)
        for generator, state in saved:
            generator.set_state(state)
        return output

    def guarded_bookkeeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = _discarded(self)
        for row in hidden:
            del self.input_batch.generators[row]
        try:
            return bookkeep(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(hidden)

    GPUModelRunner._sample = guarded_sample
    GPUModelRunner._bookkeeping_sync = guarded_bookkeeping
    GPUModelRunner.tetri_seed_guard = True


def _discarded(runner: Any) -> dict[int, Any]:
    """CPU generators by row, for the rows whose sample this step discards."""
    if runner.device.type != "cpu":
        return {}
    mask = runner.discard_request_mask.np
    num_requests = runner.input_batch.num_reqs
    return {row: gen for row, gen in runner.input_batch.generators.items() if row < num_requests and mask[row]}
