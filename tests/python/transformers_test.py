"""fovea.transformers: logits and tokens of tiny random models agree with eager; refusals are by name."""

import copy
import importlib.util
import subprocess
import sys
import tempfile
import unittest

import fovea
from support import Case

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
if not MISSING:
    import torch
    import transformers

    import fovea.transformers
    from tiny_models import FAMILIES, VOCABULARY, minimax_m3_with_vision

PROMPT, GENERATED, EVERY = 40, 32, 64

# Relative error of the logits of one token, in the 2-norm. Eager itself is 0.8 to 2 % away from fp32 in bf16 (epsilon
# 0.4 %), and every token was seen within 4.5 % of eager where all is selected. Where an index selects, rounding
# exchanges choices that are nearly equal, and what is selected later follows: most tokens, not all, are that close.
MEDIAN, EACH, SHARE = 2.5e-2, 8e-2, 0.8
DIFFERENT = 0.1


def errors(actual, expected):
    actual, expected = actual.float(), expected.float()
    return ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).flatten()


@unittest.skipIf(bool(MISSING), f"{' and '.join(MISSING)} not installed")
class TransformersCase(Case):
    device = "cpu"

    @classmethod
    def setUpClass(cls):
        transformers.logging.set_verbosity_error()
        cls.families = fovea.transformers.register()
        cls.threads = torch.get_num_threads()
        torch.set_num_threads(1)  # models this small gain nothing by more
        torch.set_grad_enabled(False)

    @classmethod
    def tearDownClass(cls):
        torch.set_grad_enabled(True)
        torch.set_num_threads(cls.threads)

    def model(self, family, implementation="fovea", seed=0, dtype=None, **options):
        torch.manual_seed(seed)
        model = FAMILIES[family](**options).eval().to(self.device, dtype or torch.bfloat16)
        model.set_attn_implementation(implementation)
        return model

    def tokens(self, *shape, seed=1):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, VOCABULARY, shape, generator=generator).to(self.device)

    def logits(self, model, tokens, prompt=None, attention_mask=None, chunk=None, cache=None):
        """Logits of all tokens: the prompt at once or in chunks, the others one after another."""
        length = tokens.shape[1]
        prompt = length if prompt is None else prompt
        chunk = chunk or prompt
        steps = [range(at, min(at + chunk, prompt)) for at in range(0, prompt, chunk)]
        steps += [range(at, at + 1) for at in range(prompt, length)]
        results = []
        for step in steps:
            mask = None if attention_mask is None else attention_mask[:, : step.stop]
            positions = None
            if mask is not None:
                positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, step.start :]
            output = model(
                tokens[:, step.start : step.stop], past_key_values=cache, use_cache=True, attention_mask=mask,
                position_ids=positions,
            )  # fmt: skip
            cache = output.past_key_values
            results.append(output.logits)
        return torch.cat(results, 1)

    def assert_agree(self, actual, expected, every_token):
        found = errors(actual, expected)
        self.assertTrue(torch.isfinite(found).all())
        self.assertLess(found.median().item(), MEDIAN)
        if every_token:
            self.assertLess(found.max().item(), EACH)
        else:
            self.assertGreater((found < EACH).float().mean().item(), SHARE)


class Models:
    """Facts about every family, on the device of the class."""

    def test_prefill_and_32_tokens_agree_with_eager(self):
        for family in self.families:
            for batch, selected in ((2, EVERY), (1, None)):
                options = {} if selected is None else {"selected": selected}
                sparse = selected is None and family != "kimi_linear"
                with self.subTest(family, batch=batch, selected=selected):
                    model = self.model(family, "eager", **options)
                    prompt = self.tokens(batch, PROMPT)
                    generated = model.generate(
                        prompt, max_new_tokens=GENERATED, min_new_tokens=GENERATED, do_sample=False,
                        output_logits=True, return_dict_in_generate=True,
                    )  # fmt: skip
                    tokens = generated.sequences[:, :-1]  # of the last one nothing follows
                    self.assertEqual(tokens.shape, (batch, PROMPT + GENERATED - 1))
                    expected = torch.cat([self.logits(model, prompt)[:, :-1], torch.stack(generated.logits, 1)], 1)
                    model.set_attn_implementation("fovea")
                    self.assert_agree(self.logits(model, tokens, PROMPT), expected, not sparse)
                    if sparse:
                        every = self.model(family, "eager", selected=EVERY)
                        # The test sees whether the selection is followed.
                        self.assertGreater(errors(self.logits(every, tokens), expected).median().item(), DIFFERENT)

    def test_rounding_is_that_of_eager(self):
        for family in self.families:
            with self.subTest(family):
                tokens = self.tokens(2, PROMPT)
                exact = self.logits(self.model(family, "eager", dtype=torch.float32, selected=EVERY), tokens)
                found = {name: errors(self.logits(self.model(family, name, selected=EVERY), tokens), exact).median()
                         for name in ("eager", "fovea")}  # fmt: skip
                self.assertLess(found["fovea"].item(), 1.25 * found["eager"].item())

    def test_generate_takes_the_largest_logits(self):
        for family in self.families:
            with self.subTest(family):
                model = self.model(family)
                prompt = self.tokens(2, PROMPT)
                tokens = model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
                logits = self.logits(model, tokens, PROMPT)[:, PROMPT - 1 : -1].float()
                logits[..., model.generation_config.eos_token_id] = -torch.inf  # as min_new_tokens has it
                self.assertTrue(torch.equal(logits.argmax(-1), tokens[:, PROMPT:]))

    def test_future_tokens_change_nothing(self):
        for family in self.families:
            with self.subTest(family):
                model = self.model(family)
                tokens = self.tokens(2, PROMPT)
                other = tokens.clone()
                other[:, 25:] = self.tokens(2, PROMPT - 25, seed=2)
                first, second = self.logits(model, tokens), self.logits(model, other)
                self.assertLess(errors(first[:, :25], second[:, :25]).max().item(), 1e-2)
                self.assertGreater(errors(first[:, 25:], second[:, 25:]).median().item(), DIFFERENT)

    def test_chunks_with_a_cache_agree_with_one_prefill(self):
        for family in self.families:
            with self.subTest(family):
                model = self.model(family, selected=EVERY)
                tokens = self.tokens(2, PROMPT)
                self.assert_agree(self.logits(model, tokens, chunk=13), self.logits(model, tokens), True)

    def padded(self, family):
        """Tokens with 7 of padding in the second row, where the family takes it, and their mask."""
        mask = torch.ones(2, PROMPT, dtype=torch.long, device=self.device)
        if family == "minimax_m3_vl_text":
            mask[1, -7:] = 0
        else:
            mask[1, :7] = 0
        return self.tokens(2, PROMPT).masked_fill(mask == 0, 0), mask

    def test_padding_agrees_with_eager_and_with_the_row_alone(self):
        for family in self.families:
            with self.subTest(family):
                tokens, mask = self.padded(family)
                model = self.model(family, selected=EVERY)
                actual = self.logits(model, tokens, attention_mask=mask)
                model.set_attn_implementation("eager")
                self.assert_agree(actual[mask == 1], self.logits(model, tokens, attention_mask=mask)[mask == 1], True)
                if family == "deepseek_v4":  # its windows of compression count slots, padding included
                    continue
                model.set_attn_implementation("fovea")
                alone = self.logits(model, tokens[1:, mask[1] == 1])
                self.assert_agree(actual[1][mask[1] == 1], alone[0], True)

    def test_decode_behind_padding_on_the_left(self):
        for family in set(self.families) - {"minimax_m3_vl_text"}:
            with self.subTest(family):
                tokens, mask = self.padded(family)
                tokens = torch.cat([tokens, self.tokens(2, 8, seed=2)], 1)
                mask = torch.nn.functional.pad(mask, (0, 8), value=1)
                model = self.model(family, selected=EVERY)
                actual = self.logits(model, tokens, PROMPT, mask)
                model.set_attn_implementation("eager")
                expected = self.logits(model, tokens, PROMPT, mask)
                self.assert_agree(actual[:, PROMPT:], expected[:, PROMPT:], True)

    def test_beams_reorder_caches(self):
        for family in set(self.families) - {"deepseek_v4"}:  # transformers does not reorder all of its cache
            with self.subTest(family):
                model = self.model(family)
                options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 2}
                whole = model.generate(self.tokens(1, 12), **options, return_dict_in_generate=True, output_scores=True)
                length = whole.sequences.shape[1]
                logits = self.logits(model, whole.sequences, length).float().log_softmax(-1)
                score = logits[0, 11:-1].gather(-1, whole.sequences[0, 12:, None]).sum()
                self.assertAlmostEqual(score.item() / 6, whole.sequences_scores.item(), delta=0.1)

    def test_a_static_cache_that_is_not_compiled(self):
        for family in ("minimax_m3_vl_text", "kimi_linear", "deepseek_v32"):
            with self.subTest(family):
                model = self.model(family, selected=EVERY)
                tokens = self.tokens(2, PROMPT)
                cache = transformers.StaticCache(config=model.config, max_cache_len=61)
                actual = self.logits(model, tokens, PROMPT - 6, cache=cache)
                self.assert_agree(actual, self.logits(model, tokens), True)

    def test_saved_models_load_with_it(self):
        with tempfile.TemporaryDirectory() as folder:
            model = self.model("deepseek_v32", selected=EVERY)
            model.save_pretrained(folder)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, attn_implementation="fovea"
            ).to(self.device)
            self.assertEqual(loaded.config._attn_implementation, "fovea")
            tokens = self.tokens(2, PROMPT)
            self.assert_agree(self.logits(loaded, tokens), self.logits(model, tokens), True)

    def test_an_image_between_tokens(self):
        tokens = self.tokens(1, PROMPT).clamp(max=VOCABULARY - 3)  # the last two are images and videos
        pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0)).to(self.device)
        torch.manual_seed(0)
        model = minimax_m3_with_vision().eval().to(self.device, torch.bfloat16)
        tokens[:, 5:9] = model.config.image_token_id  # 4 x 4 patches, merged by 2 x 2
        inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]], device=self.device)}
        logits = {}
        for implementation in ("eager", "fovea"):
            model.set_attn_implementation(implementation)
            self.assertEqual(model.config.text_config._attn_implementation, implementation)
            logits[implementation] = model(input_ids=tokens, **inputs).logits
        self.assert_agree(logits["fovea"], logits["eager"], False)
        text = model(input_ids=tokens, pixel_values=pixels * 0, image_grid_thw=inputs["image_grid_thw"]).logits
        self.assertGreater(errors(text, logits["eager"])[9:].median().item(), DIFFERENT)


class TransformersTest(Models, TransformersCase):
    """On the CPU."""


@unittest.skipUnless(
    not MISSING and torch.cuda.is_available() and fovea.available("sparse_mla", "cuda")[0],
    "torch, transformers, a GPU or fovea's CUDA is missing",
)
class TransformersCudaTest(Models, TransformersCase):
    """On a GPU."""

    device = "cuda"

    def test_widths_of_the_released_models(self):
        heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
        latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        widths = {
            "minimax_m3_vl_text": {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
                                   "rotary_dim": 64, "index_head_dim": 128, "index_block_size": 128},
            "deepseek_v4": {"num_attention_heads": 64, "sliding_window": 128, "o_groups": 8, "index_n_heads": 64,
                            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}},
            "kimi_linear": {**heads, **latent, "linear_head_dim": 128, "linear_num_heads": 16},
            "deepseek_v32": {**heads, **latent, "index_n_heads": 64},
        }  # fmt: skip
        for family in self.families:
            with self.subTest(family):
                model = self.model(family, "eager", selected=2048, **widths[family])
                tokens = self.tokens(2, 1100)
                expected = self.logits(model, tokens, 1092)
                model.set_attn_implementation("fovea")
                self.assert_agree(self.logits(model, tokens, 1092), expected, False)


class RegistrationTest(TransformersCase):
    def test_it_is_idempotent_and_can_be_undone(self):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention
        from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

        owners = (DeepseekV32Attention, KimiLinearDeltaAttention)
        forwards = [owner.forward for owner in owners]
        self.assertEqual(fovea.transformers.register(), fovea.transformers.FAMILIES)
        self.assertEqual([owner.forward for owner in owners], forwards)
        fovea.transformers.unregister()
        try:
            self.assertNotIn("fovea", AttentionInterface())
            self.assertNotIn("fovea", AttentionMaskInterface())
            self.assertTrue(all(not hasattr(owner.forward, "fovea_original") for owner in owners))
            with self.assertRaisesRegex(ValueError, "not supported"):
                self.model("kimi_linear")
        finally:
            fovea.transformers.register()
        self.assertIn("fovea", AttentionInterface())
        self.assertIn("fovea", AttentionMaskInterface())

    def test_other_implementations_run_as_before(self):
        for family in ("kimi_linear", "deepseek_v32"):
            tokens = self.tokens(2, PROMPT)
            model = self.model(family, "eager", dtype=torch.float32)
            before = self.logits(model, tokens)
            fovea.transformers.unregister()
            try:
                self.assertTrue(torch.equal(self.logits(model, tokens), before))
            finally:
                fovea.transformers.register()

    def test_without_the_mask_function_nothing_runs(self):
        from transformers import AttentionMaskInterface

        registered = AttentionMaskInterface._global_mapping.pop("fovea")
        try:
            for family in self.families:
                with self.subTest(family), self.assertRaises((fovea.Unsupported, TypeError)) as caught:
                    self.logits(self.model(family), self.tokens(1, 8))
                if family != "deepseek_v32":  # transformers itself stops there: it has no mask to index
                    self.assertRegex(str(caught.exception), "mask")
        finally:
            AttentionMaskInterface._global_mapping["fovea"] = registered

    def test_without_torch_the_reason_is_said(self):
        code = "import sys; sys.modules['torch'] = None; import fovea; import fovea.transformers"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("pip install torch", done.stderr)


class RefusalsTest(TransformersCase):
    def refused(self, kind, text, family, call):
        with self.subTest(family, text=text), self.assertRaisesRegex(kind, text):
            call()

    def test_types_and_gradients(self):
        for family in self.families:
            for dtype in ("float32", "float16"):
                if (family, dtype) == ("deepseek_v4", "float16"):
                    continue
                model = self.model(family, dtype=getattr(torch, dtype))
                self.refused(fovea.InvalidArgument, f"torch.{dtype}, expected torch.bfloat16", family,
                             lambda model=model: self.logits(model, self.tokens(1, 8)))  # fmt: skip
            model = self.model(family)
            with torch.enable_grad():
                self.refused(fovea.Unsupported, "gradients", family, lambda model=model: model(self.tokens(1, 8)))

    def test_dropout_and_attention_weights(self):
        for family in self.families:
            model = self.model(family, attention_dropout=0.1).train()
            self.refused(fovea.Unsupported, "dropout 0.1", family, lambda model=model: model(self.tokens(1, 8)))
        for family in self.families:
            model = self.model(family)
            self.refused((fovea.Unsupported, ValueError), "output_attentions", family,
                         lambda model=model: model(self.tokens(1, 8), output_attentions=True))  # fmt: skip

    def test_shapes(self):
        v4 = self.model("deepseek_v4", head_dim=256)
        self.refused(fovea.Unsupported, "width 256, expected one of 512", "v4", lambda: v4(self.tokens(1, 8)))
        v32 = self.model("deepseek_v32", kv_lora_rank=256)
        self.refused(fovea.Unsupported, "kv_lora_rank 256", "v32", lambda: v32(self.tokens(1, 8)))
        kimi = self.model("kimi_linear", linear_conv_kernel_dim=3)
        self.refused(fovea.Unsupported, "convolution of width 3", "kimi", lambda: kimi(self.tokens(1, 8)))
        m3 = self.model("minimax_m3_vl_text", index_n_heads=1)
        self.refused(fovea.Unsupported, "1 index heads and 2 KV heads", "m3", lambda: m3(self.tokens(1, 8)))

    def test_masks(self):
        left = torch.ones(2, 8, dtype=torch.long)
        left[0, :3] = 0
        holes = torch.ones(2, 8, dtype=torch.long)
        holes[1, 3:5] = 0
        m3, kimi = self.model("minimax_m3_vl_text"), self.model("kimi_linear")
        tokens = self.tokens(2, 8)
        self.refused(fovea.Unsupported, "left padding", "m3", lambda: m3(tokens, attention_mask=left))
        own = torch.zeros(2, 1, 8, 8, dtype=torch.bfloat16)
        for name, model in (("m3", m3), ("kimi", kimi)):
            self.refused(fovea.Unsupported, "both sides of padding", name,
                         lambda model=model: model(tokens, attention_mask=holes))  # fmt: skip
            self.refused(fovea.Unsupported, r"\[batch, tokens\]", name,
                         lambda model=model: model(tokens, attention_mask=own))  # fmt: skip
            packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2)
            self.refused(fovea.Unsupported, "packed sequences", name,
                         lambda model=model: model(tokens, position_ids=packed, use_cache=False))  # fmt: skip

    def test_other_models(self):
        config = transformers.LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                          num_attention_heads=2, attn_implementation="fovea")  # fmt: skip
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
        self.refused(
            fovea.Unsupported, "no attention for model type 'llama'", "llama", lambda: model(self.tokens(1, 8) % 32)
        )

    def test_a_copy_of_a_model_keeps_its_own_implementation(self):
        model = self.model("kimi_linear")
        tokens = self.tokens(1, PROMPT)
        self.logits(model, tokens)
        other = copy.deepcopy(model).float()
        other.set_attn_implementation("eager")
        self.assert_agree(self.logits(model, tokens), self.logits(other, tokens), True)


if __name__ == "__main__":
    unittest.main()
