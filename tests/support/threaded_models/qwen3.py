"""A Qwen3 that loads its weights like SGLang's DeepSeek-V2, which copies each tensor in a thread pool."""

from concurrent.futures import ThreadPoolExecutor, as_completed

from sglang.srt.model_loader.utils import maybe_executor_submit, should_async_load
from sglang.srt.models.qwen3 import Qwen3ForCausalLM as _Qwen3ForCausalLM


class Qwen3ForCausalLM(_Qwen3ForCausalLM):
    """Loads each tensor in a thread."""

    def load_weights(self, weights):
        with ThreadPoolExecutor() as executor:
            futures = []
            for name, tensor in weights:
                maybe_executor_submit(
                    executor=executor,
                    futures=futures,
                    use_async=should_async_load(tensor),
                    func=super().load_weights,
                    func_args=([(name, tensor)],),
                )
            for future in as_completed(futures):
                future.result()


EntryClass = Qwen3ForCausalLM
