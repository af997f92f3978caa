"""The transfer of policy versions from the learner to the engines, and the verification of the transferred bytes.

The learner publishes a version and offers it to the engines. The offer has the path and the digest of the version's
manifest, which describes all tensors. An engine fetches the version while it generates, and then pauses to load it.
"""
