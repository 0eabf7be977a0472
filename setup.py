"""The entry point of pip: configures CMake, builds with ninja, and gives setuptools the extension module."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from build_backend import environment  # noqa: E402


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        found = environment.toolchain()
        # setuptools' build_temp is a new folder for every editable install. In this folder, rebuilds are incremental.
        build = ROOT / "build" / f"{found.backend}-{sys.implementation.cache_tag}"
        cache = build / "CMakeCache.txt"
        if cache.is_file() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
            shutil.rmtree(build)  # the tree was moved, and CMake refuses to build in another place
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": found.ninja,
            "MOE_FP8_ARCHS": found.archs,
            "MOE_FP8_BACKEND": found.backend,
            "MOE_FP8_PYTHON_INCLUDE": sysconfig.get_path("include"),
            "MOE_FP8_TORCH": found.torch.path,
            "MOE_FP8_VERSION": self.distribution.get_version(),
        }
        if found.backend == "rocm":
            options["MOE_FP8_PYTHON"] = sys.executable
        if found.backend == "cuda":
            os.environ["CUDACXX"] = found.device_compiler
        target = " ".join([found.backend, *found.archs.split(";")]).rstrip()
        print(f"moe_fp8_ext: building for {target} ({found.reason}), torch {found.torch.version}", flush=True)
        defines = [f"-D{name}={value}" for name, value in options.items()]
        self._cmake(found, "configure", "-S", ROOT, "-B", build, "-G", "Ninja", *defines)
        jobs = os.environ.get("MAX_JOBS")
        self._cmake(found, "build", "--build", build, *(["--parallel", jobs] if jobs else []))
        module = Path(self.get_ext_fullpath(ext.name))
        module.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(build / "_C.so"), str(module))

    def _cmake(self, found: environment.Toolchain, verb: str, *args: object) -> None:
        if subprocess.run([found.cmake, *map(str, args)]).returncode:
            environment.fail(f"CMake could not {verb} the extension; see its messages above.")


def sources() -> list[str]:
    files = [*ROOT.glob("csrc/**/*.*"), *ROOT.glob("build_backend/*.py"), ROOT / "CMakeLists.txt"]
    return sorted(str(file.relative_to(ROOT)) for file in files)


if not environment.has_setuptools():
    environment.fail(f"needs setuptools>={environment.SETUPTOOLS_MINIMUM}: run pip install -U setuptools first.")

setup(
    ext_modules=[Extension("moe_fp8_ext._C", sources=[], depends=sources())],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=[environment.TORCH],
)
