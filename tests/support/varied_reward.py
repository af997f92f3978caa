"""A reward that an untrained policy sometimes gets, so that its gradient is not 0."""


def share_of_even_digits(prompt, response_text):
    return sum(letter in "02468" for letter in response_text) / max(1, len(response_text))
