"""A reward that differs between answers of an untrained policy, so that the gradient is not 0."""


def share_of_even_digits(prompt, response_text):
    return sum(letter in "02468" for letter in response_text) / max(1, len(response_text))
