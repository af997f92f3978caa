"""The reward of the sorting task: how many of the leading numbers are right."""


def leading_numbers(prompt, response_text):
    """Return the share of the answer that is right up to the first mistake, in [0, 1].

    Args:
        prompt: Has ``ground_truth``, here ``"4 7 15 23"``, ``data_source``, and ``extra``, the columns of
            ``data.extra_keys``.
        response_text: What the policy wrote, decoded, without special tokens.
    """
    expected, written = prompt.ground_truth.split(), response_text.split()
    right = 0
    while right < min(len(expected), len(written)) and expected[right] == written[right]:
        right += 1
    return right / max(len(expected), len(written))
