"""Tests on a real Ray cluster of this machine, which they start themselves: make test-ray."""

import pytest
from commands.small_runs import small_once

NUM_NODES, CPUS_OF_A_NODE = 3, 2


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--ray"):
        for item in items:
            if item.path.parent.name == "real_ray":
                item.add_marker(pytest.mark.skip(reason="starts a Ray cluster: make test-ray"))


class Nodes:
    """Raylets of this machine, each a node of a cluster."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        head = {"num_cpus": CPUS_OF_A_NODE, "include_dashboard": False}
        self.cluster, self._others = Cluster(initialize_head=True, head_node_args=head), []
        self.complete()

    def complete(self):
        """As many as there are to be."""
        while len(self._others) < NUM_NODES - 1:
            self._others.append(self.cluster.add_node(num_cpus=CPUS_OF_A_NODE))

    def lose_one_of(self, ids):
        """End a node as a machine ends that loses its power; of two there is one that this process does not depend on."""
        lost = next(node for node in self._others if node.node_id in ids)
        self._others.remove(lost)
        self.cluster.remove_node(lost, allow_graceful=False)
        return lost.node_id


@pytest.fixture(scope="session")
def nodes():
    found = None
    try:
        found = Nodes()
        yield found
    finally:
        if found is not None:
            found.cluster.shutdown()


@pytest.fixture(scope="session")
def cluster(nodes):
    """Ray, connected to the nodes."""
    from strop.runtime.cluster.connection import load_ray

    ray = load_ray()
    ray.init(address=nodes.cluster.address, logging_level="error")
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)
