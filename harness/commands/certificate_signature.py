"""Who made a certificate, where somebody signed it: by OpenSSH's own signatures, made and checked by `ssh-keygen`.

    ssh-keygen -Y sign -f KEY -n bitproof-certificate certificate.json        writes certificate.json.sig

certificate.json holds the SHA-256 of the other files, so that its signature is the certificate's. Whom to believe is
told by a file of allowed signers, as ssh-keygen takes it: a line `NAME namespaces="bitproof-certificate" KEY`.
"""

from __future__ import annotations

from pathlib import Path

from bitproof.harness.certificate.errors import RejectedError, rejecting, require
from bitproof.harness.errors import MachineError
from bitproof.harness.processes.command import CommandError, Ran, run_command

NAMESPACE = "bitproof-certificate"
SECONDS = 30.0


def signer_of(main: Path, signers: Path) -> str:
    """The name by which a file of allowed signers knows who signed a certificate's main file, as it is now.

    Raises RejectedError without a signature, and for one of another content, namespace or signer. Raises MachineError
    where there is no ssh-keygen.
    """
    signature = main.with_name(f"{main.name}.sig")
    require(signature.is_file(), f"nobody signed it: there is no {signature.name}")
    names = _keygen("find-principals", "-f", str(signers), "-s", str(signature))
    require(names.status == 0 and bool(names.out.strip()), "signed by nobody of the allowed signers")
    with rejecting():
        content = main.read_bytes().decode()  # whose every byte is signed
    why = ""
    for name in names.out.splitlines():
        by = ("-I", name, "-n", NAMESPACE, "-f", str(signers), "-s", str(signature))
        found = _keygen("verify", *by, given=content)
        if found.status == 0:
            return name
        why = (found.err or found.out).strip().partition("\n")[0]
    raise RejectedError(f"its signature is of something else, or for something else: {why}")


def _keygen(action: str, *words: str, given: str | None = None) -> Ran:
    try:
        return run_command(["ssh-keygen", "-Y", action, *words], SECONDS, given=given)
    except CommandError as error:
        raise MachineError(
            f"signatures are checked by ssh-keygen: {error}", fix="install OpenSSH 8.2 or later"
        ) from error
