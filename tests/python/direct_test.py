"""A call that goes from its caller to the operator is the call that the function's body makes."""

import sys
import types
import unittest

import numpy as np

import fovea
from calls import i32, legal_calls
from support import Case


def body_of(function):
    """The function as Python alone runs it."""
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def frames_of(call):
    """Functions of the package that Python enters in a call."""
    entered = []

    def look(frame, event, _):
        if event == "call" and frame.f_globals.get("__package__") == "fovea":
            entered.append(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


class DirectCallTest(Case):
    def setUp(self):
        self.good = {"logits": np.zeros((2, 4), np.float32), "row_len": i32([4, 3]), "topk": 2}

    @unittest.skipIf(sys.version_info < (3, 12), "Python 3.12 and up")
    def test_no_frame_of_the_package_is_entered(self):
        for op, arguments in legal_calls().items():
            with self.subTest(op):
                self.assertEqual(frames_of(lambda: getattr(fovea, op)(**arguments)), [])
        body = body_of(fovea.topk_select)
        self.assertEqual(frames_of(lambda: body(**self.good)), ["topk_select", "call"])

    def test_results_are_those_of_the_body(self):
        for op, arguments in legal_calls().items():
            with self.subTest(op):
                function, others = getattr(fovea, op), legal_calls()[op]
                mine, its = function(**arguments), body_of(function)(**others)
                self.assertIs(type(mine), type(its))
                pairs = [(arguments[name], others[name]) for name in arguments]
                if isinstance(mine, dict):
                    self.assertEqual(list(mine), list(its))
                    mine, its = tuple(mine.values()), tuple(its.values())
                pairs += zip(mine, its) if isinstance(mine, tuple) else [(mine, its)]
                for one, other in pairs:
                    if isinstance(one, np.ndarray):
                        self.assert_same(one, other)

    def test_results_that_an_argument_asks_for(self):
        arguments = legal_calls()["sparse_mla"]
        for asked, count in ((False, 2), (True, 3), (0, 2), (1, 3), (np.True_, 3)):
            for call in (fovea.sparse_mla, body_of(fovea.sparse_mla)):
                self.assertEqual(len(call(**arguments, return_max_logits=asked)), count)
        with self.assertRaises(ValueError):
            fovea.sparse_mla(**arguments, return_max_logits=np.zeros(2))

    def test_names_that_were_put_together(self):
        expected = fovea.topk_select(**self.good)
        names = {"".join(list(name)): value for name, value in self.good.items()}
        self.assert_same(fovea.topk_select(**names), expected)

    def test_arguments_that_do_not_fit_are_refused_by_python(self):
        logits, row_len = self.good["logits"], self.good["row_len"]
        wrong = [((), {}), ((logits,), {}), ((logits, row_len), {"topk": 2, "depth": 3}),
                 ((logits, row_len, 2), {"topk": 2}), ((logits, row_len, 2, None, None, None, None, None), {})]  # fmt: skip
        for given, named in wrong:
            texts = []
            for call in (fovea.topk_select, body_of(fovea.topk_select)):
                with self.assertRaises(TypeError) as caught:
                    call(*given, **named)
                texts.append(str(caught.exception))
            self.assertEqual(texts[0], texts[1])

    def test_errors_are_those_of_the_body(self):
        class Strange:
            def __dlpack__(self, **options):
                raise KeyError("strange")

            def __dlpack_device__(self):
                return 1, 0

        for change in ({"topk": -2}, {"topk": object()}, {"logits": 3}, {"logits": Strange()}, {"impl": "none"},
                       {"impl": b""}, {"out": (1, 2)}, {"out": {3: None}}, {"out": {"other": i32([0])}}):  # fmt: skip
            errors = []
            for call in (fovea.topk_select, body_of(fovea.topk_select)):
                with self.assertRaises(fovea.Error) as caught:
                    call(**self.good | change)
                errors.append((type(caught.exception), str(caught.exception)))
            self.assertEqual(errors[0], errors[1])

    def test_a_function_that_was_changed_takes_its_body(self):
        function, defaults, code = fovea.sparse_mla, fovea.sparse_mla.__kwdefaults__, fovea.sparse_mla.__code__
        arguments = legal_calls()["sparse_mla"]  # the last row has no valid slot
        try:
            function.__kwdefaults__ = {**defaults, "empty_lse": "pos_inf"}
            self.assertTrue(np.isposinf(function(**arguments)[1][2]).all())
            function.__kwdefaults__ = defaults
            self.assertTrue(np.isneginf(function(**arguments)[1][2]).all())
            function.__code__ = (lambda **named: "other").__code__
            self.assertEqual(function(**arguments), "other")
        finally:
            function.__kwdefaults__, function.__code__ = defaults, code
        self.assertEqual(frames_of(lambda: function(**arguments)), [] if sys.version_info >= (3, 12) else ["sparse_mla", "call"])


if __name__ == "__main__":
    unittest.main()
