"""The entry point of pip: configures CMake, builds with ninja, and gives setuptools the library.

The library needs no Python, so a wheel is tagged py3-none: one serves every interpreter. With MOE_FP8_LOCAL_VERSION=1,
the version says how it was built, as torch's does: 0.1.0+cu130, 0.1.0+cpu.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from build_backend import environment, old_glibc  # noqa: E402

LIBRARY = "libmoe_fp8.so"


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        found = environment.toolchain()
        # setuptools' build_temp is a new folder for every editable install. In this folder, rebuilds are incremental.
        build = ROOT / "build" / found.variant
        cache = build / "CMakeCache.txt"
        if cache.is_file() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
            shutil.rmtree(build)  # the tree was moved, and CMake refuses to build in another place
        glibc = os.environ.get("MOE_FP8_GLIBC", "")
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": found.ninja,
            "MOE_FP8_ARCHS": found.archs,
            "MOE_FP8_BACKEND": found.backend,
            "MOE_FP8_GLIBC": old_glibc.stand_ins(glibc, build / f"glibc-{glibc}", platform.machine()) if glibc else "",
            "MOE_FP8_NAMESPACE": os.environ.get("MOE_FP8_NAMESPACE", ""),
            "MOE_FP8_TORCH": found.torch.path,
            "MOE_FP8_VERSION": self.distribution.get_version(),
        }
        if found.backend == "rocm":
            options["MOE_FP8_PYTHON"] = sys.executable
        if found.backend == "cuda":
            os.environ["CUDACXX"] = found.device_compiler
        target = " ".join([found.variant, *found.archs.split(";")]).rstrip()
        print(f"moe_fp8_ext: building for {target} ({found.reason}), torch {found.torch.version}", flush=True)
        defines = [f"-D{name}={value}" for name, value in options.items()]
        self._cmake(found, "configure", "-S", ROOT, "-B", build, "-G", "Ninja", *defines)
        jobs = os.environ.get("MAX_JOBS")
        self._cmake(found, "build", "--build", build, *(["--parallel", jobs] if jobs else []))
        for old in ROOT.glob("moe_fp8_ext/_C.*.so"):  # of earlier versions: Python would import it instead of _C.py
            old.unlink()
        package = Path(self.get_ext_fullpath(ext.name)).parent
        package.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(build / LIBRARY), str(package / LIBRARY))

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / LIBRARY)

    def _cmake(self, found: environment.Toolchain, verb: str, *args: object) -> None:
        if subprocess.run([found.cmake, *map(str, args)]).returncode:
            environment.fail(f"CMake could not {verb} the extension; see its messages above.")


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def sources() -> list[str]:
    files = [*ROOT.glob("csrc/**/*.*"), *ROOT.glob("build_backend/*.py"), ROOT / "CMakeLists.txt"]
    return sorted(str(file.relative_to(ROOT)) for file in files)


if not environment.has_setuptools():
    environment.fail(f"needs setuptools>={environment.SETUPTOOLS_MINIMUM}: run pip install -U setuptools first.")

# A source archive has no variant: pip expects of it the version that it asked for.
wants_variant = os.environ.get("MOE_FP8_LOCAL_VERSION") == "1" and "sdist" not in sys.argv

setup(
    ext_modules=[Extension("moe_fp8_ext.libmoe_fp8", sources=[], depends=sources())],
    cmdclass={"bdist_wheel": AnyPython, "build_ext": CMakeBuild},
    install_requires=[environment.TORCH],
    options={"egg_info": {"tag_build": f"+{environment.toolchain().variant}"}} if wants_variant else {},
)
