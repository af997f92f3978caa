"""The transfer of policy versions from the learner to the engines, and the verification of the transferred bytes.

The learner publishes a version and offers it to the engines. The offer names the version's manifest, a description of
all tensors, by path and digest. An engine fetches the version while it generates, and then pauses to load it.
"""
