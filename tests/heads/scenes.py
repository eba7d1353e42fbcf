"""Small pyramids and boxes for tests of detection heads."""

import torch

CLASSES, CHANNELS, PADDED = 3, 8, (96, 128)
SIZES, ORIGINAL = [(96, 128), (75, 101)], [(61, 83), (150, 202)]
STRIDES = (4, 8, 16, 32, 64)


def levels_of(seed=0, dtype=torch.float32, grad=False, images=2):
    g = torch.Generator().manual_seed(seed)
    shapes = [[-(-n // s) for n in PADDED] for s in STRIDES]
    return [torch.randn(images, CHANNELS, *s, generator=g).to(dtype).requires_grad_(grad) for s in shapes]


def boxes_of(n, seed=0, size=PADDED):
    g = torch.Generator().manual_seed(seed)
    corner = torch.rand(n, 2, generator=g) * torch.tensor([size[1], size[0]]) * 0.6
    return torch.cat([corner, corner + 4 + torch.rand(n, 2, generator=g) * torch.tensor([size[1], size[0]]) * 0.3], 1)


def truth_of(counts, seed=0):
    g = torch.Generator().manual_seed(seed)
    made = []
    for i, n in enumerate(counts):
        boxes, masks = boxes_of(n, seed + i, SIZES[i]), torch.zeros(n, *PADDED, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.round().int().tolist(), strict=True):
            mask[y1:y2, x1 : (x1 + x2) // 2] = 1
        made.append({"boxes": boxes, "labels": torch.randint(CLASSES, (n,), generator=g), "masks": masks})
    return made
