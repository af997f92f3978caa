"""Weight offers for tests in which nothing reads the weights."""

from asyncrl.protocol.manifest import WeightOffer


def bare_offer(version: int) -> WeightOffer:
    """An offer of a version without a manifest."""
    return WeightOffer(version=version, manifest=f"/weights/v{version}/manifest.json", digest="", num_bytes=0)
