"""The turn trees of the benchmark's search agent, and how many of their tokens the packer packs only once."""

from benchmarks.agent_trees import AgentLengths, search_groups, tree_tokens

SHORT = AgentLengths(turn=(2, 4), result=(3, 6), summary=(2, 3), rounds=(3, 5))


def test_a_packed_tree_has_fewer_tokens_than_separate_branches_or_turns():
    groups = search_groups(num_groups=2, num_samples=3, lengths=SHORT)
    count = tree_tokens(groups)
    assert count["num_branches"] > 2 * 3 * 3
    assert count["num_turns"] > count["num_branches"]
    assert count["trained"] == sum(group.summary.num_tokens for group in groups)
    assert count["trained"] < count["shared"] <= count["distinct"] + count["num_branches"]
    assert count["shared"] < count["branches"] < count["turns"]


def test_the_same_seed_gives_the_same_trees():
    one, again, other = (
        tree_tokens(search_groups(num_groups=1, num_samples=2, lengths=SHORT, seed=seed)) for seed in (3, 3, 4)
    )
    assert one == again != other
