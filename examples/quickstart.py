"""One fused op, why it runs where it runs, and how close it is to the unfused ones."""

import torch
import torch.nn.functional as F

import onepass

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(8, 128, 4096, dtype=torch.bfloat16, device=device)
weight, bias = torch.randn(2, 4096, dtype=torch.bfloat16, device=device)

fused = onepass.layer_norm_silu(x, weight, bias)  # x is read once, the result written once
unfused = F.silu(F.layer_norm(x, [4096], weight, bias))  # two kernels, and a round trip through memory between them

print("largest difference:", (fused - unfused).abs().max().item())
print(onepass.explain(onepass.layer_norm_silu, x, weight, bias))
