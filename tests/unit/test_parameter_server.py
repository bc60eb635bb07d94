"""The address of TensorFlow's server in the chief of a parameter-server cluster."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist import tf_config
from tfdist.cluster import TFConfig
from tfdist.parameter_server import PORTS, _at_a_free_port

CLUSTER = tf_config.local_cluster(workers=2, ps=1, chief=True, ports=[7001, 7002, 7003, 7004])
CONFIG = TFConfig(CLUSTER, CLUSTER.chief)


def taken(resolver):
    raise tf.errors.UnknownError(None, None, "Could not start gRPC server")


def test_it_is_of_the_chiefs_host_and_the_others_keep_theirs():
    jobs = _at_a_free_port(CONFIG, lambda resolver: resolver.cluster_spec().as_dict())
    host, _, port = jobs.pop("chief")[0].rpartition(":")
    assert (host, port == "7001") == ("127.0.0.1", False)
    assert jobs == {"worker": ["127.0.0.1:7002", "127.0.0.1:7003"], "ps": ["127.0.0.1:7004"]}


def test_another_port_is_tried_where_it_was_taken_meanwhile():
    tried = []

    def make(resolver):
        tried.append(resolver.cluster_spec().as_dict()["chief"][0])
        return len(tried) if len(tried) > 1 else taken(resolver)

    assert _at_a_free_port(CONFIG, make) == len(set(tried)) == 2


def test_in_the_end_the_error_is_raised():
    tried = []
    with pytest.raises(tf.errors.UnknownError):
        _at_a_free_port(CONFIG, lambda resolver: tried.append(resolver) or taken(resolver))
    assert len(tried) == PORTS
