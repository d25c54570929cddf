"""Fine-tune the experts of a Hugging Face GPT-OSS with PEFT's LoRA, on our experts implementation: two lines more.

The model is small and random, so that it needs no download: with `GptOssForCausalLM.from_pretrained(...,
experts_implementation="fusible_ops")` the rest is the same. Needs transformers and peft.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GptOssConfig, GptOssForCausalLM

from fusible_ops.integrations import huggingface

STEPS, PERIOD = 20, 7

huggingface.install()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = GptOssConfig(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=128,
    num_local_experts=8,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    layer_types=["full_attention", "full_attention"],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    experts_implementation=huggingface.NAME,
)
base = GptOssForCausalLM(config).to(device, torch.bfloat16)
weights = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=[], target_parameters=weights))
before = {name: p.detach().clone() for name, p in model.named_parameters()}

tokens = (torch.arange(16 * 32, device=device) % PERIOD + 1).view(16, 32)  # what comes next can be learnt
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
for step in range(STEPS):
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step in (0, STEPS - 1):
        print(f"step {step + 1:2d}: loss {loss.item():.3f}")

changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
print(f"{len(changed)} of {len(before)} parameters changed, all of them LoRA's: {all('lora_' in n for n in changed)}")
print(huggingface.explain(model, "sm_90a"))
