# ruff: noqa: D102 - methods that setuptools calls are described there
"""Builds the native libraries into jdp/lib; without a compiler jdp installs without them.

JDP_CUDA=auto (default) builds the CUDA library where there are nvcc and an NVIDIA GPU: it takes a
minute or two of a processor. "on" demands it, with nvcc alone; "off" leaves it out.
JDP_CUDA_ARCH=90 builds it for such GPUs alone (compute capability 9.0, several with commas), in
half the time. CXX is the C++ compiler.
"""

import concurrent.futures
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.dist import Distribution

ROOT = Path(__file__).parent
CSRC = ROOT / "jdp" / "csrc"
# No contraction: sums must have the same bits on all CPUs.
CXX_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
NVCC_FLAGS = [
    *("-std=c++17", "-O3", "--shared", "-cudart", "static", "--threads=0"),
    *("-Xcompiler", "-fPIC,-fvisibility=hidden"),
]
# A100, H100 and H200, B200. Others run the code of the first one, compiled by their driver.
GPU_ARCHITECTURES = (80, 90, 100)
# What the driver leaves where there is a GPU: on Linux, in a container, in Windows' Linux.
SIGNS_OF_A_GPU = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")


# More of a compiler's messages says no more: one wrong header repeats them for each file.
MAX_SHOWN_LINES = 40


class BuildError(Exception):
    """The reason why a library was not built, in one line; and the compiler's messages."""

    def __init__(self, reason, messages=""):
        super().__init__(reason)
        self.messages = messages


class BuildNative(Command):
    """Compiles what has changed since the last build."""

    description = "build the native libraries"
    user_options = []
    editable_mode = False

    def initialize_options(self):
        self.build_lib: Any = None

    def finalize_options(self):
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self):
        # Into the sources' tree, whatever is built, so that a second build has nothing to do.
        lib = ROOT / "jdp" / "lib"
        for name, make in (("cpu", build_cpu), ("cuda", build_cuda)):
            # pip shows a build's output only if it is asked to, so the reason stays on file.
            library, reason = lib / f"libjdp_{name}.so", lib / f"libjdp_{name}.txt"
            try:
                make(library)
                reason.unlink(missing_ok=True)
            except BuildError as error:
                print(
                    f"{error.messages}jdp: no {name.upper()} library, JAX's own collectives "
                    f"instead: {error}",
                    file=sys.stderr,
                )
                library.unlink(missing_ok=True)
                lib.mkdir(exist_ok=True)
                reason.write_text(f"{error}\n")
                if name == "cuda" and cuda_wanted() == "on":
                    sys.exit(1)
        if not self.editable_mode:
            for path in results():
                self.copy_file(path, self._in_wheel(path))

    def _in_wheel(self, path):
        target = Path(self.build_lib, path.relative_to(ROOT))
        self.mkpath(str(target.parent))
        return str(target)

    def get_source_files(self):
        return [str(path.relative_to(ROOT)) for path in sources(CSRC)]

    def get_outputs(self):
        if self.editable_mode:
            return []
        return [str(Path(self.build_lib, path.relative_to(ROOT))) for path in results()]

    def get_output_mapping(self):
        return {}


class PlatformWheel(bdist_wheel):
    """A wheel for any Python: the libraries know nothing of it."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class NativeDistribution(Distribution):
    """A distribution for one platform, though it holds no Python extension."""

    def has_ext_modules(self):
        return True


def build_cpu(library):
    """Compile jdp/csrc/cpu."""
    if not sys.platform.startswith("linux"):
        raise BuildError("it is written for Linux")
    cxx = compiler()
    include, version = ffi_headers()
    files = [path for path in sources(CSRC / "cpu") if path.suffix == ".cc"]
    stamp = Stamp(library, sources(CSRC / "cpu"), cxx + CXX_FLAGS, version)
    if stamp.is_fresh():
        return
    library.parent.mkdir(exist_ok=True)
    flags = [*CXX_FLAGS, "-isystem", str(include)]
    with tempfile.TemporaryDirectory() as objects:

        def compiled(path):
            target = Path(objects, f"{path.stem}.o")
            run([*cxx, *flags, "-c", str(path), "-o", str(target)])
            return str(target)

        # The longest first, so that all cores end at the same time.
        files.sort(key=lambda path: path.stat().st_size, reverse=True)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            files = list(pool.map(compiled, files))
        link([*cxx, *CXX_FLAGS, "-shared", *files], library)
    stamp.write()


def build_cuda(library):
    """Compile jdp/csrc/cuda."""
    files = sources(CSRC / "cuda") if (CSRC / "cuda").is_dir() else []
    if cuda_wanted() == "off":
        raise BuildError("JDP_CUDA=off")
    if not any(path.suffix == ".cu" for path in files):
        raise BuildError("there are no sources for it")
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise BuildError("nvcc was not found")
    include, version = ffi_headers()
    command = [nvcc, *NVCC_FLAGS, *gencode_flags(nvcc)]
    stamp = Stamp(library, files, command, version)
    if stamp.is_fresh():
        return
    if cuda_wanted() == "auto" and not any(map(os.path.exists, SIGNS_OF_A_GPU)):
        raise BuildError("no NVIDIA GPU was found when jdp was installed; JDP_CUDA=on builds it")
    library.parent.mkdir(exist_ok=True)
    inputs = [str(path) for path in files if path.suffix in (".cu", ".cc")]
    link([*command, "-isystem", str(include), *inputs], library)
    stamp.write()


def gencode_flags(nvcc):
    """Return the flags for the GPUs that are wanted: before 12.8 nvcc refuses sm_100."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True)
    if listed.returncode:
        raise BuildError(f"`{nvcc} --list-gpu-arch` failed: CUDA 11.8 or newer is needed")
    known = set(re.findall(r"^compute_(\d+)$", listed.stdout, re.M))
    demanded = os.environ.get("JDP_CUDA_ARCH")
    wanted = re.findall(r"[^,\s]+", demanded) if demanded else list(map(str, GPU_ARCHITECTURES))
    chosen = sorted(known.intersection(wanted), key=int)
    if demanded and not (wanted and known.issuperset(wanted)):
        raise BuildError(
            f"JDP_CUDA_ARCH is {demanded!r}, and {nvcc} knows {', '.join(sorted(known, key=int))}: "
            "write some of these"
        )
    if not chosen:
        listed = ", ".join(f"compute_{arch}" for arch in wanted)
        raise BuildError(f"{nvcc} knows none of {listed}: CUDA 11.8 or newer is needed")
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in chosen]
    return [*flags, f"-gencode=arch=compute_{chosen[0]},code=compute_{chosen[0]}"]


class Stamp:
    """What a library was built from."""

    def __init__(self, library, files, command, version):
        digest = hashlib.sha256(json.dumps(command).encode())
        for path in [*files, *sources(CSRC / "common")]:
            digest.update(str(path.relative_to(CSRC)).encode() + b"\0" + path.read_bytes())
        self.library, self.path = library, library.with_suffix(".json")
        self.now = {"digest": digest.hexdigest(), "ffi_api": list(version)}

    def is_fresh(self):
        # A library of older headers runs with newer ones, so environments that take turns with
        # one checkout keep the one of the oldest.
        if not (self.library.exists() and self.path.exists()):
            return False
        then = json.loads(self.path.read_text())
        return then["digest"] == self.now["digest"] and then["ffi_api"] <= self.now["ffi_api"]

    def write(self):
        """Remember it, and say what was built."""
        self.path.write_text(json.dumps(self.now))
        version = ".".join(map(str, self.now["ffi_api"]))
        print(f"jdp: built {self.library.name} with XLA's FFI API {version}", file=sys.stderr)


def results():
    """List what a wheel takes along: libraries, or why there are none."""
    lib = ROOT / "jdp" / "lib"
    return sorted([*lib.glob("libjdp_*.so"), *lib.glob("libjdp_*.txt")])


def sources(folder):
    """List the C++ and CUDA files of a folder and below, in one order."""
    suffixes = (".cc", ".h", ".cu", ".cuh")
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes)


def compiler():
    """Give the command of the C++ compiler."""
    if wanted := os.environ.get("CXX"):
        return shlex.split(wanted)
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise BuildError("there is no C++ compiler (g++, clang++ or $CXX)")


def ffi_headers():
    """Give folder and version of XLA's FFI headers, which jaxlib brings."""
    spec = importlib.util.find_spec("jaxlib")  # does not import it
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("jaxlib, which has XLA's headers, is not installed; take 0.10.2")
    include = Path(spec.submodule_search_locations[0]) / "include"
    header = include / "xla" / "ffi" / "api" / "c_api.h"
    if not header.exists():
        raise BuildError(f"jaxlib has no {header}")
    numbers = re.findall(r"#define XLA_FFI_API_M(?:AJOR|INOR) (\d+)", header.read_text())
    return include, tuple(int(number) for number in numbers)


def cuda_wanted():
    """Give JDP_CUDA."""
    wanted = os.environ.get("JDP_CUDA", "auto")
    if wanted not in ("auto", "on", "off"):
        sys.exit(f"JDP_CUDA is {wanted!r}; write auto, on or off.")
    return wanted


def link(command, library):
    """Run the last command, and put the library in place whole."""
    partial = library.with_suffix(f".{os.getpid()}")
    run([*command, "-o", str(partial)])
    partial.replace(library)


def run(command):
    """Run a compiler; its first messages are shown if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        shown = lines[:MAX_SHOWN_LINES]
        if len(lines) > len(shown):
            shown.append(f"... and {len(lines) - len(shown)} more lines")
        reason = f"{shlex.join(command[:1])} failed with {done.returncode}, see its messages"
        raise BuildError(reason, "".join(f"{line}\n" for line in shown))


if __name__ == "__main__":
    build.sub_commands = [*build.sub_commands, ("build_native", None)]
    setup(
        cmdclass={"build_native": BuildNative, "bdist_wheel": PlatformWheel},
        distclass=NativeDistribution,
    )
