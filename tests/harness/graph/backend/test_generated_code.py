"""Generated code by its name: what may differ between two compilations, and what may not."""

from __future__ import annotations

import pytest

from bitproof.harness.graph.backend.generated_code import count_launches, hash_generated

CODE = """# AOT ID: ['{number}_inference']
# kernel path: {folder}/ab/{name}.py
kernel = async_compile.triton('kernel', '''
# a comment in /{name}.py
triton_meta={{'device': DeviceProperties(type='cuda', index={index}, cc=90)}}
x = tl.load(p + {offset})
''', device_str='cuda')
def call(args):
    x = empty((4, {index_like}), device='cuda:{index}')
    y = empty(({rows}, {others}, {rows}))
    with torch.cuda._DeviceGuard({index}):
        raw_stream{index} = get_raw_stream({index})
        stream{index} = raw_stream{index}
        kernel.run(x, stream=stream{index}, cache='{folder}')
"""
SAME = {"number": 0, "name": "caa", "index": 0, "offset": 0, "index_like": 3, "rows": "u0", "others": "u1"}


def hashed(folder, index=None, **changes):
    values = SAME | ({"index": index} if index is not None else {}) | changes
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / f"{values['name']}.py").write_text(CODE.format(folder=folder, **values))
    (folder / "ab" / "kernel.so").write_bytes(b"\0")
    return hash_generated(folder, values["index"])


@pytest.mark.parametrize(
    "changes",
    [{}, {"number": 7}, {"name": "cbb"}, {"index": 3}, {"index": 7, "name": "cbb"}, {"rows": "u12", "others": "u7"}],
)
def test_folders_names_comments_and_the_devices_index_are_left_out(tmp_path, changes):
    assert hashed(tmp_path / "one") == hashed(tmp_path / "other", **changes)


@pytest.mark.parametrize("changes", [{"offset": 1}, {"index_like": 4}, {"others": "u0"}])
def test_whatever_else_is_generated_is_not(tmp_path, changes):
    assert hashed(tmp_path / "one") != hashed(tmp_path / "other", **changes)


def test_a_number_that_is_as_large_as_the_index_stays(tmp_path):
    """The tensor's size is 3 too, and no device."""
    assert hashed(tmp_path / "one", index=3) != hashed(tmp_path / "other", index=3, index_like=0)


def test_another_devices_index_stays(tmp_path):
    (tmp_path / "x.py").write_text("x = to('cuda:2')")
    assert hash_generated(tmp_path, 0) == hash_generated(tmp_path, 1) != hash_generated(tmp_path, 2)


def test_launches_of_kernels_that_the_code_defines_are_counted_and_no_other_calls(tmp_path):
    """One in Triton is launched once, one for the CPU twice; calls of torch's own kernels are none."""
    hashed(tmp_path)
    (tmp_path / "ab" / "cpp.py").write_text(
        "cpp_fused_add_0 = async_compile.cpp_pybinding(['float*'], '''\n    cpp_fused_add_1(x)\n''')\n"
        "def call(args):\n    cpp_fused_add_0(x)\n    extern_kernels.mm(x, y)\n    cpp_fused_add_0(y)\n"
    )
    assert count_launches(tmp_path) == 3


def test_code_that_is_generated_twice_counts_twice(tmp_path):
    (tmp_path / "x.py").write_text("x = 1")
    once = hash_generated(tmp_path)
    (tmp_path / "y.py").write_text("x = 1")
    assert hash_generated(tmp_path) != once
