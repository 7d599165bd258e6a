"""Code of installed packages is not the caller's, whichever environment they are installed in."""

from __future__ import annotations

import sys

import pytest

from bitproof import prove
from bitproof.harness.powers.proofs.prover.programs.reachable import is_users_file
from tests.harness.powers.proofs.toy_graphs import randn


@pytest.mark.parametrize(
    "path",
    [
        "/home/me/.local/lib/python3.12/site-packages/pkg/__init__.py",
        "/usr/lib/python3/dist-packages/pkg.py",
        "/opt/under/lib/python3.12/site-packages/pkg/inner/deep.py",
    ],
)
def test_a_package_of_any_environment_is_not_the_callers(path):
    assert not is_users_file(path)


@pytest.mark.parametrize("path", ["/home/me/site-packages.py", "/home/me/my-site-packages/train.py", "<stdin>"])
def test_a_file_elsewhere_is(path):
    assert is_users_file(path)


def test_what_a_package_of_an_environment_below_keeps_in_its_globals_refuses_no_proof(tmp_path, monkeypatch):
    folder = tmp_path / "below" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "layered_package.py").write_text(
        "class Base:\n    pass\n\nclass Layer(Base):\n    def __call__(self, x):\n        return found and x * 2\n\n"
        "found = super(Layer, Layer())\n"
    )
    monkeypatch.syspath_prepend(folder)
    from layered_package import Layer

    layer = Layer()
    assert prove(lambda x: layer(x), lambda x: layer(x), randn(3)).verdict == "PROVED"
    sys.modules.pop("layered_package")
