"""The transfer of policy versions from the learner to the engines, and the verification of the transferred bytes.

The learner publishes a version and offers it to the engines. The manifest of a version describes all tensors of the
version. The offer has the path and the digest of the manifest. The host of an engine fetches the version while the
engine generates. Then the engine pauses to load the version. With ``weights.collective_into=engine``, the engine is
paused for the whole transfer.
"""
