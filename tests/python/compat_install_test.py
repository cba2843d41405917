"""fovea.compat.install: which modules there are, what it leaves alone, what it undoes."""

import importlib
import pathlib
import re
import sys
import tempfile
import types
import unittest

import fovea
import fovea.compat
from fovea.compat._install import MODULES

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "compat"


class InstallTest(unittest.TestCase):
    def setUp(self):
        self.addCleanup(fovea.compat.uninstall)
        self.before = dict(sys.modules)

    def test_names_come_from_the_import_paths_of_engines(self):
        names = fovea.compat.install(override=True)
        self.assertEqual(names, sorted(MODULES))
        for name, functions in MODULES.items():
            module = importlib.import_module(name)
            for function in functions:
                self.assertIs(getattr(module, function.__name__), function)
                self.assertIs(getattr(fovea.compat, function.__name__), function)
        import flashinfer.decode

        self.assertIs(flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla,
                      fovea.compat.trtllm_batch_decode_with_kv_cache_mla)  # fmt: skip

    def test_uninstall_leaves_no_trace(self):
        fovea.compat.install()
        fovea.compat.uninstall()
        self.assertEqual(fovea.compat.installed(), [])
        for name in MODULES:
            self.assertIs(sys.modules.get(name), self.before.get(name))

    def test_a_second_call_changes_nothing(self):
        first = fovea.compat.install()
        modules = {name: sys.modules[name] for name in first}
        self.assertEqual(fovea.compat.install(), first)
        self.assertTrue(all(sys.modules[name] is module for name, module in modules.items()))

    def test_an_imported_package_stays_as_it_is(self):
        other = types.ModuleType("deep_gemm")
        other.get_num_sms = lambda: 7
        sys.modules["deep_gemm"] = other
        self.addCleanup(lambda: sys.modules.pop("deep_gemm"))
        self.assertNotIn("deep_gemm", fovea.compat.install())
        self.assertEqual(other.get_num_sms(), 7)

    def test_override_puts_names_into_the_package_and_takes_them_out_again(self):
        with tempfile.TemporaryDirectory() as folder:
            package = pathlib.Path(folder) / "sgl_kernel"
            package.mkdir()
            (package / "__init__.py").write_text("def fast_topk_v2(): return 7\ndef other(): return 8\n")
            sys.path.insert(0, folder)
            self.addCleanup(sys.path.remove, folder)
            self.addCleanup(lambda: sys.modules.pop("sgl_kernel", None))
            self.assertNotIn("sgl_kernel", fovea.compat.install())
            names = fovea.compat.install(override=["sgl_kernel"])
            self.assertIn("sgl_kernel", names)
            self.assertIn("sgl_kernel.flash_mla", names)  # the package has no such module
            import sgl_kernel

            self.assertIs(sgl_kernel.fast_topk_v2, fovea.compat.fast_topk_v2)
            self.assertEqual(sgl_kernel.other(), 8)
            fovea.compat.uninstall()
            self.assertEqual(sgl_kernel.fast_topk_v2(), 7)
            self.assertFalse(hasattr(sgl_kernel, "flash_mla"))
            self.assertNotIn("sgl_kernel.flash_mla", sys.modules)

    def test_override_names_packages_that_there_are(self):
        with self.assertRaisesRegex(fovea.InvalidArgument, "install: override has .'numpy'"):
            fovea.compat.install(override={"numpy"})
        self.assertEqual(fovea.compat.installed(), [])

    def test_the_package_imports_without_torch(self):
        self.assertEqual([name for name in fovea.compat.__all__ if not hasattr(fovea.compat, name)], [])

    @unittest.skipUnless(DOCS.is_dir(), "the documentation is not beside the tests")
    def test_the_page_lists_exactly_these_names(self):
        rows = re.findall(r"^\| `from (\S+) import ([^`]*)` \|", (DOCS / "README.md").read_text(), re.M)
        listed = {}
        for module, names in rows:
            listed.setdefault(module, set()).update(names.split(", "))
        self.assertEqual(listed, {name: {f.__name__ for f in functions} for name, functions in MODULES.items()})


if __name__ == "__main__":
    unittest.main()
