"""The reward of the sorting task: the share of correct numbers before the first mistake."""


def leading_numbers(prompt, response_text):
    """Return the share of the answer that is correct up to the first mistake, in [0, 1].

    Args:
        prompt: Its ``ground_truth`` is, for example, ``"4 7 15 23"``. It also has ``data_source``, and ``extra`` with
            the columns of ``data.extra_keys``.
        response_text: The decoded text that the policy wrote, without special tokens.
    """
    expected, written = prompt.ground_truth.split(), response_text.split()
    right = 0
    while right < min(len(expected), len(written)) and expected[right] == written[right]:
        right += 1
    return right / max(len(expected), len(written))
