"""The transfer of policy versions from the learner to the engines, and its verification."""
