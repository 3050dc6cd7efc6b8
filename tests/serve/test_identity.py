"""Many clients at a time: each gets the same answers as alone."""

from support.running_server import Running
from support.server_requests import alone, answers, request

from metal_prefill import Model


def test_64_clients_each_get_the_same_answers_as_alone(vector_server: Running, vector_model: Model) -> None:
    requests = [request(i) for i in range(64)]
    assert answers(vector_server, requests) == [alone(vector_model, *r) for r in requests]
