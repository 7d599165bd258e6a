from bitproof.harness.machine.gpus import read_gpu_environment
from bitproof.harness.machine.nccl import pin_nccl


def test_launches_have_an_order_and_nccls_own_sums_one_algorithm():
    ordered, native = {}, {}
    pin_nccl(ordered, native=False)
    assert ordered == {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    pin_nccl(native, native=True)
    assert native == ordered | {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}


def test_what_is_pinned_is_recorded_and_what_somebody_set_stays():
    environment = {"NCCL_ALGO": "Tree"}
    pin_nccl(environment, native=True)
    assert environment["NCCL_ALGO"] == "Tree"
    assert read_gpu_environment(environment) == environment
