"""Select the environment variables that can affect the bits of results, for manifests and for the keys of caches.

- Manifests may be published, so they only have listed variables: variables of numerical libraries, and variables of
  torch that select an implementation.
- The key of a cache must change with every variable that might affect bits, so it has all variables of torch.
- Neither contains values that look like secrets, such as `hf_...` tokens.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping

_LIBRARIES = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NPY_", "ATEN_", "ONEDNN_", "DNNL_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "GLOO_", "TRITON_"),
    *("TORCHINDUCTOR_", "TORCHDYNAMO_"),
)
_TORCH_PREFIXES = (
    *("TORCH_BLAS_", "TORCH_COMPILE_", "TORCH_CUDNN_", "TORCH_CUDAGRAPH_", "TORCH_DISTRIBUTED_", "TORCH_DYNAMO_"),
    *("TORCH_FAKE_TENSOR_", "TORCH_GLOO_", "TORCH_INDUCTOR_", "TORCH_LINALG_", "TORCH_LINEAR_", "TORCH_MKLDNN_"),
    *("TORCH_NCCL_", "TORCH_NATIVE_", "TORCH_ROCM_", "TORCH_SPARSE_", "TORCH_SYMMMEM_"),
    *("PYTORCH_DDP_", "PYTORCH_JIT", "PYTORCH_MIOPEN_", "PYTORCH_TENSOREXPR", "PYTORCH_TUNABLEOP_"),
)
_NAMES = {
    *("PYTHONHASHSEED", "LD_PRELOAD", "GLIBC_TUNABLES", "NVIDIA_TF32_OVERRIDE"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_COMPILER_COLLECTIVES", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
    *("TORCH_DISABLE_FUNCTIONALIZATION_META_REFERENCE", "TORCH_DISABLE_NATIVE_JIT", "TORCH_USE_RTLD_GLOBAL"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    *("PYTORCH_REORDER_COLLECTIVES_LIMIT", "PYTORCH_SINK_WAITS_LIMIT", "PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK"),
}
# Variables of torch that a manifest does not list are in the key of a cache, too.
_CACHE_KEY_PREFIXES = (*_LIBRARIES, "TORCH", "PYTORCH")
# These variables differ from launch to launch, and do not affect bits.
_LAUNCH_SPECIFIC = ("TORCHELASTIC_", "TORCHINDUCTOR_CACHE_DIR")

_SECRET_NAME = re.compile(
    r"(^|_)(API_?KEYS?|KEYS?|TOKENS?|SECRETS?|PASS(WORD|WD|PHRASE)?|PWD|CREDENTIALS?|CREDS?|AUTH(ORIZATION)?|BEARER|"
    r"COOKIES?|SIGNATURE|PRIVATE|CERT(IFICATE)?S?|LOGIN|USER(NAME)?|WEBHOOK|DSN|SAS|PAT|JWT)(_|$)|TOKEN$|SECRET$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"://[^/\s]*@|[?&;](\w*(token|key|sig|signature|secret|password|auth)\w*)=|\b(bearer|basic)\s+\S{8,}"
    r"|(^|[^A-Za-z0-9])(gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[a-z]-|AKIA|ASIA|AIza|eyJ)[A-Za-z0-9_-]{10,}"
    r"|-----BEGIN|\b(token|secret|password|passwd|api_?key)\s*[=:]\s*\S",
    re.IGNORECASE,
)
# A word of letters and digits that is as long as keys and tokens are.
_LONG_WORD = re.compile(r"(?=[^\s/\\,:;.]*[0-9])(?=[^\s/\\,:;.]*[A-Za-z])[A-Za-z0-9_+=~-]{32,}")


def environment_variables() -> dict[str, str]:
    """Return the environment variables that can affect the bits of results, by name, for a manifest.

    Variables whose names look like secrets, or whose values differ from launch to launch, are left out. A value that
    looks like a secret is replaced by its digest.
    """
    return {name: redacted(value) for name, value in _relevant(os.environ) if _is_listed(name)}


def environment_of_keys() -> dict[str, str]:
    """Return the environment variables for the key of a cache: those of a manifest, and all others that torch might
    read.

    The values of these others are replaced by digests.
    """
    return {name: redacted(value) if _is_listed(name) else _digest(value) for name, value in _relevant(os.environ)}


def redacted(value: str) -> str:
    """Return a variable's value; if it looks like a secret, a text with its digest."""
    return _digest(value) if _SECRET_VALUE.search(value) or _LONG_WORD.search(value) else value


def _relevant(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    return [
        (name, value)
        for name, value in sorted(environment.items())
        if (name.startswith(_CACHE_KEY_PREFIXES) or name in _NAMES)
        and not name.startswith(_LAUNCH_SPECIFIC)
        and not _SECRET_NAME.search(name)
    ]


def _is_listed(name: str) -> bool:
    return name.startswith((*_LIBRARIES, *_TORCH_PREFIXES)) or name in _NAMES


def _digest(value: str) -> str:
    return f"withheld, sha256 {hashlib.sha256(value.encode(errors='surrogateescape')).hexdigest()[:16]}"
