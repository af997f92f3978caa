"""The transfer of policy versions from the learner to the engines, and its verification.

The learner publishes a version and offers it. The offer has the path and the digest of the version's manifest. An
engine fetches the version while it generates, and then pauses to load it.
"""
