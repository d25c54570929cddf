"""Bytes that other projects' quantisers gave for `values(...)`, so that the tests need none of those projects.

| key | made with |
|---|---|
| casts | ml_dtypes 0.6.0, inputs clamped to the largest value first |
| fp8 blocks | Transformer Engine's test reference `BlockwiseQuantizerReference` (commit d0067d0), padded storage too |
| fp8 tensor | `CurrentScalingQuantizerRef` of the transformer-engine 2.20.2 wheel, on the CPU |
| mxfp8 | torchao 0.18.0 `to_mx(..., ScaleCalculationMode.RCEIL)`; column-wise from the transposed matrix |
| nvfp4 | `NVFP4QuantizerRef` of the transformer-engine 2.20.2 wheel, on the CPU |
| swizzle | torchao 0.18.0 `to_blocked` |

Digests are the first 32 hex digits of SHA-256 over the bytes in row order: (data, scale) row-wise, then column-wise.
"""

from __future__ import annotations

import hashlib

import torch

from cute_kernels.quantization.formats import E4M3, E5M2, Format, fp8_block, fp8_tensor, mxfp8, nvfp4


def values(rows: int, columns: int, seed: int = 0, low: int = -6, high: int = 3) -> torch.Tensor:
    """BF16 [rows, columns] with mixed signs and magnitudes from 2^low to 2^high, from integer arithmetic alone."""
    index = torch.arange(rows * columns, dtype=torch.int64) + seed * 1_000_003
    for factor in (0x45D9F3B, 0x2C1B3C6D):
        index = ((index ^ (index >> 15)) * factor) & 0x7FFFFFFF
    sign, exponent, mantissa = index & 1, 127 + low + (index >> 1) % (high - low), (index >> 9) & 127
    bits = (sign << 15) | (exponent << 7) | mantissa
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16).reshape(rows, columns)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:32]


# ----------------------------------------------------------------------------------------------------------------------
# Single values: ties, denormals, zeros, the largest value and beyond

_inf = float("inf")
CASTS = (
    # x, E4M3 byte, E5M2 byte
    (0.0, 0x00, 0x00),
    (-0.0, 0x80, 0x80),
    (2.0**-10, 0x00, 0x14),
    (1.5 * 2.0**-10, 0x01, 0x16),
    (2.0**-9, 0x01, 0x18),
    (1.5 * 2.0**-9, 0x02, 0x1A),
    (2.0**-7, 0x04, 0x20),
    (15 / 512, 0x0F, 0x28),
    (0.0625, 0x18, 0x2C),
    (1.0, 0x38, 0x3C),
    (1.0625, 0x38, 0x3C),
    (1.1875, 0x3A, 0x3D),
    (1.125, 0x39, 0x3C),
    (17.0, 0x58, 0x4C),
    (19.0, 0x5A, 0x4D),
    (240.0, 0x77, 0x5C),
    (248.0, 0x78, 0x5C),
    (431.9, 0x7D, 0x5F),
    (432.0, 0x7E, 0x5F),
    (448.0, 0x7E, 0x5F),
    (464.0, 0x7E, 0x5F),
    (465.0, 0x7E, 0x5F),
    (1e30, 0x7E, 0x7B),
    (_inf, 0x7E, 0x7B),
    (2.0**-17, 0x00, 0x00),
    (1.5 * 2.0**-17, 0x00, 0x01),
    (57344.0, 0x7E, 0x7B),
    (61440.0, 0x7E, 0x7B),
    (61441.0, 0x7E, 0x7B),
)

# ----------------------------------------------------------------------------------------------------------------------
# Small matrices in full: (data, scale)

NVFP4_ROWS = (  # first four rows of values(16, 32)
    "4050a588095080ef3f16e1986910b589" "6c4194c86a03018f8f1601eb9821509d"
    "a80475c8882700888e1360d0991f2790" "8c3e0180c96962f5885e24a08f280100",
    "7d7d7a7c7e7d767a",
)  # fmt: skip
NVFP4_AMAX = 7.90625

MXFP8_ROWS = (  # values(4, 64, 2, -20, 12), E4M3
    "0200f80185bf088009008000808001ed0052803c808100800000810181d700df"
    "002f8000aca100807510c780c6c900004f7dab80fdd564000000005d8000bc86"
    "00eb0300d5588c805e9221018000f7ba01b900008000bd8000800200ba808080"
    "5e015756ef8080fd00560049878ccd8000000028b98080ae65610ee20009fb00"
    "a9a300de7512c5d8c7cc002a007cb08180f200004400828a82da2e7b02298080"
    "80801214000180bd80807a00001c9080f9922265842680e925bc82a2004c0000"
    "8281a8a0000040748080d68071420c0ea88080810b0b750080a7a4804476a679"
    "808001800100bb65828456ad6501800080e97c800078e9188094d88280802b2e",
    "838281828282817f",
)

FP8_ROWS = (  # values(2, 130, 7, -20, 12), E4M3 1x128; the scales are powers of two
    "80148003049802808004970200430080cc80ce0e0008009f82808004160008f7"
    "80809f5e00005bcb80808281a7003d2457e880808128020000d281bbf30d0111"
    "0080a8d1bf72000100c5c08080008207718900808000cb5d00800080806a8072"
    "28808080801580090c806a00e20000acc3a98000a80000e10080ab494e4d0080"
    "fee7e000000000808086831c805f1e890080b380800000855982800180004a84"
    "00848548805044b54ce6800000d40081803bd25222df73a48121ea090e806f80"
    "8070802277e925808017805d1b1d5880808082000047538080b18000018810c0"
    "d000c700140000f2bda080030390800280030417629e80808062009800808070"
    "f8007bdc",
    (4, 4, -13, -18),  # log2 of the four blocks, first the two of columns 0 to 127
)

# ----------------------------------------------------------------------------------------------------------------------
# Large matrices

Digests = tuple[str, str, str, str]

FP8_BLOCKS: dict[Format, Digests] = {  # values(200, 300, 5, -20, 12); scales in padded storage
    fp8_block(E4M3, 1, False): (
        "e7b0bdee4b759b3dc4ec76c97b044b13",
        "bc3b158b50b9db53c9f68eee1336678a",
        "c08d55f5b590fb4715cc88dee129d205",
        "726e00b7e4002ceb70072b53b178804f",
    ),
    fp8_block(E4M3, 1, True): (
        "56cc31dab7ddce3ad7eaecd3b67ef7ae",
        "63cb96c188c0ce88fb4755d93ee54cb1",
        "622c665ba78e48d1840c460be7dc2cb0",
        "50000fddf5a064bcfe791bd8be4beeee",
    ),
    fp8_block(E4M3, 2, False): (
        "55aed2a32638de7ae08269f6a1b7322d",
        "077c4f960d04c87c26d222e5aefb0925",
        "cfb82852b2ef44a0b67468713c83f191",
        "f13101d2fbe00d4a3b3f8a58de9188f5",
    ),
    fp8_block(E4M3, 2, True): (
        "75aae8254112edf1aa625d158e9b49a2",
        "1ff130cce60f4fc159d5f0ed84213e9c",
        "c4ad9ae9d39bd8cc616dc7c4d42ba0e1",
        "43140e4cf173ebb061b321ead1b80e41",
    ),
    fp8_block(E5M2, 1, False): (
        "d2e62d7812d9981b95f5ceb4589108c6",
        "7ee1f8d716616e9d84d3e5779f9465dc",
        "22f2188161add3c44cca9390972b0974",
        "0959b19c70069dc3b5d1d044fa484db9",
    ),
    fp8_block(E5M2, 1, True): (
        "aebeda93ce4be40ba04115a66d205b65",
        "c70066e36ff55829cfec1a10d0176c27",
        "4f32f0a910ffc58a91bc210956105b75",
        "2949bb6677b1f5bd941b1f99558da6de",
    ),
    fp8_block(E5M2, 2, False): (
        "c9a5b7c8b74be92f62897682acce646a",
        "f05005f04047a1208badc18fcacdd870",
        "ced7f54032b2b3f0340fae6797cafac2",
        "9c7c01b5d8eeee277039c0fd393888cf",
    ),
    fp8_block(E5M2, 2, True): (
        "b709c213304c58576a562ea7230c23d6",
        "62b4fc79d607583c63a131e7bac3bfdf",
        "721e5656d94f3f0e5bb101b616cb923d",
        "a9b079e6562f803041a94533aa551ebb",
    ),
}

FP8_TENSORS: dict[Format, tuple[str, float, str]] = {  # values(64, 96, 6): data, scale, column-wise data
    fp8_tensor(E4M3, False): (
        "3c669066b570cca0fe7cd9c15852a8ca",
        float.fromhex("0x1.236db6p-6"),
        "fc8e9159acee5c3ff3fb016af180f758",
    ),
    fp8_tensor(E4M3, True): ("014943fed2720d20127005d507affafa", 2.0**-5, "ed08aec7643cb8c174e5adc31022fe2d"),
    fp8_tensor(E5M2, False): (
        "fdae2a46f9a109ac33c0e5bae0e6c07a",
        float.fromhex("0x1.236db6p-13"),
        "a4dd08267a9a52c79d7f685c684ba82f",
    ),
    fp8_tensor(E5M2, True): ("5540a2e315772453a70ba00b620a3c18", 2.0**-12, "b0d14978945e9e8140700dcb0f6df199"),
}

MXFP8: dict[Format, Digests] = {  # values(256, 512, 4, -30, 30)
    mxfp8(E4M3): (
        "31cc643c196a09ada9d8213e460f7e14",
        "5d8a8722602d52bac79e5063f1cf1e9c",
        "af5916ce0b8b614aac723886a2b87ac8",
        "e3a6b8ba091402be1e5f847ec62acefc",
    ),
    mxfp8(E5M2): (
        "e16c595bd369e5267657bb30084cbe60",
        "16b19bc7f758b79525069920650c13a5",
        "d016b0c4b8f419b9bb63b3bccabffd8c",
        "2cf66610feeee662172082c2bf55e774",
    ),
}

NVFP4: dict[Format, Digests] = {  # values(256, 512, 1); one scale for each 1x16, also of square blocks
    nvfp4(): (
        "a26325d650da7acbaebcc5288d9fbff4",
        "731888e23307210ab617e1334e6c706d",
        "9083afae2bad2d75f8374d8ef83a3229",
        "11478edda67530e3d666c8a99db74b5f",
    ),
    nvfp4(2): (
        "bfdba701719e84d21a9e5452ba430179",
        "b3f7e5bfe8cc327d66b308a39286a051",
        "6294d0109b10e0ac6a99a54aff096267",
        "d3ea994158907ab2678fc5ea288f2d00",
    ),
    nvfp4(hadamard=True): (
        "a26325d650da7acbaebcc5288d9fbff4",
        "731888e23307210ab617e1334e6c706d",
        "2ebc36d6cd3770744a84f512918d1ef6",
        "95d5ecd1ee0c8921e910d472abc5fd4e",
    ),
}

SWIZZLED = "b208dbb44b9d2c7d56686397a40bd2df"  # uint8 [130, 6] counting modulo 251
