"""Networks: pictures, sequences, attention, generation, agents."""

# ruff: noqa: B007 - programs print after their loops how far they came
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from basics import show
from torch import nn


def fit(model: nn.Module, loss_of, device: str, steps: int = 4, lr: float = 1e-2) -> None:  # type: ignore[no-untyped-def]
    """Trains and prints each loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        show(loss.item())


# ---- pictures


class LeNet(nn.Module):
    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, 8, 3), nn.Conv2d(8, 16, 3)
        self.drop1, self.drop2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(16 * 6 * 6, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc2(self.drop2(F.relu(self.fc1(torch.flatten(self.drop1(x), 1))))), 1)


def mnist(device: str) -> None:
    model = LeNet().to(device)
    x, y = torch.randn(16, 1, 16, 16, device=device), torch.randint(0, 10, (16,), device=device)
    fit(model, lambda: F.nll_loss(model(x), y), device)
    model.eval()
    with torch.no_grad():
        print(model(x).argmax(1).eq(y).sum().item(), F.nll_loss(model(x), y, reduction="sum").item().__format__(".3f"))


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        self.skip = nn.Conv2d(inside, outside, 1, stride) if stride > 1 or inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet(device: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1),
        Residual(8, 8, 1),
        Residual(8, 16, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    ).to(device)
    x, y = torch.randn(6, 3, 16, 16, device=device), torch.randint(0, 4, (6,), device=device)
    fit(model, lambda: F.cross_entropy(model(x), y, label_smoothing=0.1), device, lr=1e-3)
    show(model[1].body[1].running_mean.sum().item(), model.eval()(x).sum().item())


def channels_last(device: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2)).to(
        device, memory_format=torch.channels_last
    )
    x = torch.randn(2, 3, 12, 12, device=device).to(memory_format=torch.channels_last)
    out = model(x)
    out.square().mean().backward()
    show(out.sum().item(), model[0].weight.grad.abs().sum().item())


def depthwise_and_dilated(device: str) -> None:
    x = torch.randn(2, 8, 14, 14, device=device, requires_grad=True)
    for layer in (
        nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 3, dilation=2), nn.ConvTranspose2d(8, 4, 4, 2, 1),
        nn.Conv2d(8, 4, 3, padding="same"),
    ):  # fmt: skip
        layer = layer.to(device)
        out = layer(x)
        out.square().sum().backward()
        show(tuple(out.shape), x.grad.sum().item(), layer.weight.grad.abs().sum().item())


def other_dimensions(device: str) -> None:
    for layer, shape in (
        (nn.Conv1d(4, 6, 5), (2, 4, 30)),
        (nn.Conv3d(2, 3, 3), (1, 2, 6, 6, 6)),
        (nn.ConvTranspose1d(4, 2, 3), (2, 4, 9)),
    ):
        x = torch.randn(shape, device=device, requires_grad=True)
        layer.to(device)(x).pow(2).sum().backward()
        show(x.grad.abs().sum().item())


def u_net(device: str) -> None:
    down, inner = nn.Conv2d(1, 8, 3, padding=1).to(device), nn.Conv2d(8, 16, 3, padding=1).to(device)
    up, out = nn.ConvTranspose2d(16, 8, 2, 2).to(device), nn.Conv2d(16, 2, 1).to(device)
    model = nn.ModuleList([down, inner, up, out])
    x, y = torch.randn(2, 1, 16, 16, device=device), torch.randint(0, 2, (2, 16, 16), device=device)

    def loss() -> torch.Tensor:
        first = F.relu(down(x))
        second = F.relu(inner(F.max_pool2d(first, 2)))
        return F.cross_entropy(out(torch.cat([first, up(second)], 1)), y)

    fit(model, loss, device)


def super_resolution(device: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.Tanh(), nn.Conv2d(16, 4, 3, padding=1), nn.PixelShuffle(2)
    ).to(device)
    small, large = torch.rand(2, 1, 8, 8, device=device), torch.rand(2, 1, 16, 16, device=device)
    fit(model, lambda: F.mse_loss(model(small), large), device)
    mse = F.mse_loss(model(small), large)
    show(10 * math.log10(1 / mse.item()))


def spatial_transformer(device: str) -> None:
    locate = nn.Linear(64, 6).to(device)
    with torch.no_grad():
        locate.weight.mul_(0.01)
        locate.bias.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
    x = torch.rand(3, 1, 8, 8, device=device)
    grid = F.affine_grid(locate(x.flatten(1)).view(-1, 2, 3), x.size(), align_corners=False)
    out = F.grid_sample(x, grid, align_corners=False)
    out.sum().backward()
    show(out.sum().item(), locate.weight.grad.abs().sum().item())


def pooling_and_resizing(device: str) -> None:
    x = torch.randn(2, 3, 9, 9, device=device, requires_grad=True)
    for f in (
        lambda x: F.max_pool2d(x, 3, 2), lambda x: F.avg_pool2d(x, 2), lambda x: F.adaptive_max_pool2d(x, 4),
        lambda x: F.lp_pool2d(x.abs() + 1, 2, 2),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), lambda x: F.interpolate(x, size=5, mode="bicubic"),
        lambda x: F.pad(x, (1, 1, 2, 0), mode="reflect"), lambda x: F.unfold(x, 3),
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 3, return_indices=True), 3),
    ):  # fmt: skip
        out = f(x)
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        show(tuple(out.shape), gradient.abs().sum().item())


def normalisations(device: str) -> None:
    x = torch.randn(4, 6, 5, device=device, requires_grad=True)
    for layer in (
        nn.BatchNorm1d(6),
        nn.LayerNorm(5),
        nn.GroupNorm(3, 6),
        nn.InstanceNorm1d(6),
        nn.RMSNorm(5),
        nn.LocalResponseNorm(2),
    ):
        out = layer.to(device)(x)
        (gradient,) = torch.autograd.grad(out.pow(3).sum(), x)
        show(type(layer).__name__, out.abs().sum().item(), gradient.abs().sum().item())


def activations(device: str) -> None:
    x = torch.linspace(-3, 3, 11, device=device, requires_grad=True)
    for layer in (
        nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.ELU(), nn.SELU(), nn.Softplus(), nn.Hardswish(), nn.PReLU(),
        nn.LogSigmoid(),
        nn.Softsign(), nn.Hardtanh(), nn.CELU(), nn.Tanhshrink(), nn.Threshold(0.1, 2), nn.Softmin(0),
    ):  # fmt: skip
        out = layer.to(device)(x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        show(type(layer).__name__, out.sum().item(), gradient.sum().item())


def losses(device: str) -> None:
    a, b = torch.randn(6, 4, device=device, requires_grad=True), torch.randn(6, 4, device=device)
    classes, signs = torch.randint(0, 4, (6,), device=device), torch.randint(0, 2, (6, 4), device=device).float()
    for loss in (
        F.mse_loss(a, b), F.l1_loss(a, b), F.smooth_l1_loss(a, b), F.huber_loss(a, b),
        F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"),
        F.cross_entropy(a, classes), F.multi_margin_loss(a, classes), F.binary_cross_entropy_with_logits(a, signs),
        F.binary_cross_entropy(a.sigmoid(), signs),
        F.cosine_embedding_loss(a, b, torch.ones(6, device=device)), F.triplet_margin_loss(a, b, b.flip(0)),
        F.poisson_nll_loss(a, signs),
        F.gaussian_nll_loss(a, b, signs + 1), F.multilabel_soft_margin_loss(a, signs), F.soft_margin_loss(a, signs * 2 - 1),
        F.hinge_embedding_loss(a, signs * 2 - 1),
    ):  # fmt: skip
        (gradient,) = torch.autograd.grad(loss, a)
        show(loss.item(), gradient.abs().sum().item())


def fast_gradient_attack(device: str) -> None:
    model = LeNet().to(device).eval()
    x = torch.rand(4, 1, 16, 16, device=device, requires_grad=True)
    before = model(x).argmax(1)
    F.nll_loss(model(x), before).backward()
    after = model((x + 0.3 * x.grad.sign()).clamp(0, 1)).argmax(1)
    print(before.tolist(), after.tolist(), (before != after).sum().item())


def style_transfer(device: str) -> None:
    features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3)).to(device).requires_grad_(False)
    style = features(torch.rand(1, 3, 12, 12, device=device))
    picture = torch.rand(1, 3, 12, 12, device=device, requires_grad=True)
    optimizer = torch.optim.LBFGS([picture], max_iter=6)
    runs: list[float] = []

    def gram(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2)[0] @ x.flatten(2)[0].T / x.numel()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 1e4 * F.mse_loss(gram(features(picture)), gram(style))
        loss.backward()
        runs.append(round(loss.item(), 3))
        return loss

    optimizer.step(closure)
    print(len(runs), runs[:4])


def boxes_and_suppression(device: str) -> None:
    corners = torch.rand(30, 2, device=device) * 10
    boxes = torch.cat([corners, corners + torch.rand(30, 2, device=device) * 5 + 0.5], 1)
    scores = torch.rand(30, device=device)
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    order, kept = scores.argsort(descending=True), []
    while order.numel():
        best = order[0]
        kept.append(best.item())
        rest = order[1:]
        low, high = torch.maximum(boxes[best, :2], boxes[rest, :2]), torch.minimum(boxes[best, 2:], boxes[rest, 2:])
        overlap = (high - low).clamp(min=0).prod(1)
        order = rest[overlap / (area[best] + area[rest] - overlap) < 0.3]
    print(len(kept), kept)


def hungarian_like_matching(device: str) -> None:
    cost = torch.cdist(torch.randn(5, 3, device=device), torch.randn(5, 3, device=device))
    pairs = []
    while len(pairs) < 5:
        place = cost.argmin().item()
        row, column = divmod(place, 5)
        pairs.append((row, column))
        cost[row], cost[:, column] = math.inf, math.inf
    print(pairs)


def siamese(device: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, 4)).to(device)
    a, b = torch.rand(8, 1, 6, 6, device=device), torch.rand(8, 1, 6, 6, device=device)
    same = torch.randint(0, 2, (8,), device=device).float()
    fit(net, lambda: F.binary_cross_entropy_with_logits(-(net(a) - net(b)).norm(dim=1), same), device)


def contrastive(device: str) -> None:
    image, text = nn.Linear(12, 8).to(device), nn.Linear(10, 8).to(device)
    scale = nn.Parameter(torch.tensor(2.0, device=device))
    x, y = torch.randn(6, 12, device=device), torch.randn(6, 10, device=device)

    def loss() -> torch.Tensor:
        logits = scale.exp() * F.normalize(image(x), dim=1) @ F.normalize(text(y), dim=1).T
        target = torch.arange(6, device=device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    fit(nn.ModuleList([image, text]), loss, device)


def knowledge_distillation(device: str) -> None:
    teacher, student = nn.Linear(10, 5).to(device), nn.Linear(10, 5).to(device)
    x, y = torch.randn(12, 10, device=device), torch.randint(0, 5, (12,), device=device)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            wanted = (teacher(x) / 2).softmax(-1)
        logits = student(x)
        return (wanted * (wanted.log() - (logits / 2).log_softmax(-1))).sum() / 12 * 4 + F.cross_entropy(logits, y)

    fit(student, loss, device)


# ---- sequences


def names_by_rnn(device: str) -> None:
    rnn, head = nn.RNN(26, 16).to(device), nn.Linear(16, 3).to(device)
    optimizer = torch.optim.SGD([*rnn.parameters(), *head.parameters()], lr=0.1)
    for name, label in (("anna", 0), ("bob", 1), ("eve", 2)) * 3:
        letters = torch.tensor([ord(letter) - 97 for letter in name], device=device)
        _, hidden = rnn(F.one_hot(letters, 26).float()[:, None])
        loss = F.cross_entropy(head(hidden[0]), torch.tensor([label], device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(name, loss.item(), head(hidden[0]).topk(1).indices.item())


def language_model_by_lstm(device: str) -> None:
    table, rnn, head = nn.Embedding(20, 12), nn.LSTM(12, 16, 2, dropout=0.2), nn.Linear(16, 20)
    model = nn.ModuleList([table, rnn, head]).to(device)
    tokens = torch.randint(0, 20, (9, 4), device=device)
    state = None
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(4):
        out, state = rnn(table(tokens[:-1]), state)
        state = tuple(one.detach() for one in state)
        loss = F.cross_entropy(head(out).flatten(0, 1), tokens[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        show(loss.item(), math.exp(loss.item()))


def sine_waves_by_cells(device: str) -> None:
    first, second, head = nn.LSTMCell(1, 8).to(device), nn.LSTMCell(8, 8).to(device), nn.Linear(8, 1).to(device)
    waves = torch.sin(torch.arange(20, device=device).float() / 3).double().float().repeat(2, 1)

    def loss() -> torch.Tensor:
        a = b = None
        outputs = []
        for step in waves[:, :-1].split(1, 1):
            a = first(step, a)
            b = second(a[0], b)
            outputs.append(head(b[0]))
        return F.mse_loss(torch.cat(outputs, 1), waves[:, 1:])

    fit(nn.ModuleList([first, second, head]), loss, device)


def translation_with_attention(device: str) -> None:
    encoder, decoder = nn.GRU(8, 8, batch_first=True).to(device), nn.GRU(16, 8, batch_first=True).to(device)
    words, head = nn.Embedding(12, 8).to(device), nn.Linear(8, 12).to(device)
    source, target = torch.randint(1, 12, (3, 6), device=device), torch.randint(1, 12, (3, 4), device=device)

    def loss() -> torch.Tensor:
        keys, hidden = encoder(words(source))
        token, total = torch.zeros(3, 1, dtype=torch.long, device=device), 0
        for place in range(4):
            weights = torch.bmm(hidden.permute(1, 0, 2), keys.mT).softmax(-1)
            out, hidden = decoder(torch.cat([words(token), weights @ keys], -1), hidden)
            logits = head(out[:, 0])
            total = total + F.nll_loss(logits.log_softmax(-1), target[:, place])
            token = logits.topk(1).indices.detach()
        return total / 4

    fit(nn.ModuleList([encoder, decoder, words, head]), loss, device)


def packed_sequences(device: str) -> None:
    rnn = nn.LSTM(4, 6, bidirectional=True).to(device)
    parts = [torch.randn(length, 4, device=device) for length in (5, 3, 2)]
    packed = nn.utils.rnn.pack_sequence(parts)
    out, (hidden, _) = rnn(packed)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    padded.pow(2).sum().backward()
    show(padded.sum().item(), lengths.tolist(), hidden.sum().item(), rnn.weight_ih_l0.grad.abs().sum().item())


def speech_by_ctc(device: str) -> None:
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5)).to(device)
    sound, text = torch.randn(12, 2, 6, device=device), torch.randint(1, 5, (2, 4), device=device)
    lengths = torch.tensor([12, 10]), torch.tensor([4, 3])
    fit(net, lambda: F.ctc_loss(net(sound).log_softmax(-1), text, *lengths), device)


def tagger_with_viterbi(device: str) -> None:
    scores, transitions = torch.randn(6, 4, device=device), torch.randn(4, 4, device=device)
    best, back = scores[0], []
    for step in scores[1:]:
        found = (best[:, None] + transitions).max(0)
        best, back = found.values + step, [*back, found.indices]
    path = [best.argmax().item()]
    for pointers in reversed(back):
        path.append(pointers[path[-1]].item())
    show(path[::-1], best.max().item())


# ---- attention


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout * self.training, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30, 32), nn.Embedding(16, 32)
        self.blocks = nn.Sequential(Block(32, 4, dropout), Block(32, 4, dropout))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 30, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def small_gpt(device: str) -> None:
    model = TinyGPT().to(device)
    tokens = torch.randint(0, 30, (4, 12), device=device)
    fit(model, lambda: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()), device, 5, 1e-3)


def generation(device: str) -> None:
    model = TinyGPT().to(device).eval()
    tokens = torch.zeros(2, 1, dtype=torch.long, device=device)
    with torch.inference_mode():
        while tokens.shape[1] < 12:
            logits = model(tokens)[:, -1] / 0.8
            least = logits.topk(5).values[:, [-1]]
            tokens = torch.cat(
                [tokens, torch.multinomial(logits.masked_fill(logits < least, -math.inf).softmax(-1), 1)], 1
            )
            if (tokens[:, -1] == 3).all():
                break
    print(tokens)


def beam_search(device: str) -> None:
    model = TinyGPT(0.0).to(device).eval()
    beams, scores = torch.zeros(1, 1, dtype=torch.long, device=device), torch.zeros(1, device=device)
    with torch.no_grad():
        for _ in range(5):
            log_p = model(beams)[:, -1].log_softmax(-1) + scores[:, None]
            scores, flat = log_p.flatten().topk(3)
            beams = torch.cat([beams[flat // 30], (flat % 30)[:, None]], 1)
    print(beams, scores)


def encoder_with_padding(device: str) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    x, padding = (
        torch.randn(3, 5, 16, device=device),
        torch.tensor([[0] * 5, [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]], device=device).bool(),
    )
    out = model(x, src_key_padding_mask=padding)
    out.square().mean().backward()
    show(out.sum().item(), layer.linear1.weight.shape, model.layers[0].linear1.weight.grad.abs().sum().item())
    with torch.no_grad():
        show(model.eval()(x).sum().item())


def whole_transformer(device: str) -> None:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True).to(device)
    source, target = torch.randn(2, 6, 16, device=device), torch.randn(2, 4, 16, device=device)
    mask = nn.Transformer.generate_square_subsequent_mask(4, device=device)
    fit(model, lambda: model(source, target, tgt_mask=mask).square().mean(), device, 3)


def vision_transformer(device: str) -> None:
    patch, block, head = nn.Conv2d(3, 32, 4, 4).to(device), Block(32, 4, 0.0).to(device), nn.Linear(32, 5).to(device)
    token = nn.Parameter(torch.zeros(1, 1, 32, device=device))
    x, y = torch.randn(4, 3, 16, 16, device=device), torch.randint(0, 5, (4,), device=device)

    def loss() -> torch.Tensor:
        patches = patch(x).flatten(2).mT
        return F.cross_entropy(head(block(torch.cat([token.expand(4, -1, -1), patches], 1))[:, 0]), y)

    fit(nn.ModuleList([patch, block, head]), loss, device, 4, 1e-3)


def masked_autoencoder(device: str) -> None:
    embed, decode = nn.Linear(12, 16).to(device), nn.Linear(16, 12).to(device)
    patches = torch.randn(2, 10, 12, device=device)
    order = torch.rand(2, 10, device=device).argsort(1)
    kept = order[:, :4]
    mask = torch.ones(2, 10, device=device).scatter(1, kept, 0)
    seen = torch.gather(patches, 1, kept[..., None].expand(-1, -1, 12))

    def loss() -> torch.Tensor:
        hidden = torch.zeros(2, 10, 16, device=device).scatter(1, kept[..., None].expand(-1, -1, 16), embed(seen))
        return ((decode(hidden + hidden.mean(1, keepdim=True)) - patches).square().mean(-1) * mask).sum() / mask.sum()

    fit(nn.ModuleList([embed, decode]), loss, device)


def mixture_of_experts(device: str) -> None:
    gate, experts = nn.Linear(8, 4).to(device), nn.ModuleList(nn.Linear(8, 8) for _ in range(4)).to(device)
    x = torch.randn(20, 8, device=device)

    def loss() -> torch.Tensor:
        weights, chosen = gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(experts):
            rows, place = torch.where(chosen == number)
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return (out - x).square().mean()

    fit(nn.ModuleList([gate, experts]), loss, device)


def rotary_embeddings(device: str) -> None:
    angles = torch.outer(torch.arange(6, device=device).float(), 10000 ** -(torch.arange(0, 8, 2, device=device) / 8))
    turns = torch.polar(torch.ones_like(angles), angles)
    x = torch.randn(2, 6, 3, 8, device=device)
    turned = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns[None, :, None]).flatten(3)
    print(turned.sum(), (turned.norm(dim=-1) - x.norm(dim=-1)).abs().max() < 1e-5)


def low_rank_adapters(device: str) -> None:
    frozen = nn.Linear(12, 12).to(device).requires_grad_(False)
    down, up = nn.Linear(12, 2, bias=False).to(device), nn.Linear(2, 12, bias=False).to(device)
    nn.init.zeros_(up.weight)
    x, y = torch.randn(8, 12, device=device), torch.randn(8, 12, device=device)
    fit(nn.ModuleList([down, up]), lambda: F.mse_loss(frozen(x) + up(down(x)), y), device)


def scripted(device: str) -> None:
    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool(x.sum() > 0):
                return x
            return -x

    gate = torch.jit.script(Gate())
    print(gate(torch.tensor([-3.0, 1.0], device=device)), gate(torch.tensor([3.0, 1.0], device=device)))


# ---- generation


def autoencoder(device: str) -> None:
    model = nn.Sequential(nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, 20), nn.Sigmoid()).to(device)
    x = torch.rand(16, 20, device=device)
    fit(model, lambda: F.binary_cross_entropy(model(x), x), device)


def variational_autoencoder(device: str) -> None:
    encode, decode = nn.Linear(20, 8).to(device), nn.Linear(4, 20).to(device)
    x = torch.rand(16, 20, device=device)

    def loss() -> torch.Tensor:
        mean, log_variance = encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return F.binary_cross_entropy(decode(z).sigmoid(), x, reduction="sum") + divergence

    fit(nn.ModuleList([encode, decode]), loss, device)


def vector_quantised(device: str) -> None:
    encode, decode = nn.Linear(10, 4).to(device), nn.Linear(4, 10).to(device)
    book = nn.Embedding(8, 4).to(device)
    x = torch.randn(12, 10, device=device)

    def loss() -> torch.Tensor:
        z = encode(x)
        chosen = torch.cdist(z, book.weight).argmin(1)
        quantised = book(chosen)
        out = decode(z + (quantised - z).detach())
        return F.mse_loss(out, x) + F.mse_loss(quantised, z.detach()) + 0.25 * F.mse_loss(z, quantised.detach())

    fit(nn.ModuleList([encode, decode, book]), loss, device)


def adversarial(device: str) -> None:
    make = nn.Sequential(
        nn.ConvTranspose2d(6, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh()
    ).to(device)
    judge = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4), nn.Flatten()).to(device)
    makes, judges = (torch.optim.Adam(net.parameters(), 2e-3, betas=(0.5, 0.999)) for net in (make, judge))
    real, ones, zeros = (
        torch.rand(6, 1, 8, 8, device=device),
        torch.ones(6, 1, device=device),
        torch.zeros(6, 1, device=device),
    )
    for _ in range(4):
        fake = make(torch.randn(6, 6, 1, 1, device=device))
        judges.zero_grad()
        loss_d = F.binary_cross_entropy_with_logits(judge(real), ones) + F.binary_cross_entropy_with_logits(
            judge(fake.detach()), zeros
        )
        loss_d.backward()
        judges.step()
        makes.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(judge(fake), ones)
        loss_g.backward()
        makes.step()
        show(loss_d.item(), loss_g.item())


def wasserstein(device: str) -> None:
    make, critic = nn.Linear(3, 2).to(device), nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=5e-3)
    for _ in range(5):
        real, fake = torch.randn(16, 2, device=device) + 2, make(torch.randn(16, 3, device=device)).detach()
        loss = critic(fake).mean() - critic(real).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for p in critic.parameters():
            p.data.clamp_(-0.05, 0.05)
        show(loss.item())


def diffusion(device: str) -> None:
    betas = torch.linspace(1e-4, 0.02, 50, device=device)
    kept = torch.cumprod(1 - betas, 0)
    net = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 2)).to(device)
    data = torch.randn(32, 2, device=device) + 3

    def loss() -> torch.Tensor:
        t = torch.randint(0, 50, (32,), device=device)
        noise = torch.randn_like(data)
        noisy = kept[t, None].sqrt() * data + (1 - kept[t, None]).sqrt() * noise
        return F.mse_loss(net(torch.cat([noisy, t[:, None] / 50], 1)), noise)

    fit(net, loss, device)
    x = torch.randn(4, 2, device=device)
    with torch.no_grad():
        for t in reversed(range(50)):
            noise = net(torch.cat([x, torch.full((4, 1), t / 50, device=device)], 1))
            x = (x - betas[t] / (1 - kept[t]).sqrt() * noise) / (1 - betas[t]).sqrt()
            if t > 0:
                x += betas[t].sqrt() * torch.randn_like(x)
    print(x)


def normalising_flow(device: str) -> None:
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
    x = torch.randn(40, 2, device=device) * 2 + 1

    def loss() -> torch.Tensor:
        shift, log_scale = net(x[:, :1]).chunk(2, 1)
        z = torch.cat([x[:, :1], (x[:, 1:] - shift) * (-log_scale).exp()], 1)
        return 0.5 * z.square().sum(1).mean() + log_scale.mean()

    fit(net, loss, device)


def radiance_field(device: str) -> None:
    net = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    origins, directions = torch.zeros(6, 3, device=device), F.normalize(torch.randn(6, 3, device=device), dim=-1)
    depths = torch.linspace(1, 3, 8).to(device)
    target = torch.rand(6, 3, device=device)

    def loss() -> torch.Tensor:
        points = origins[:, None] + directions[:, None] * depths[None, :, None]
        encoded = torch.cat([f(points * 2**i) for i in range(3) for f in (torch.sin, torch.cos)], -1)
        raw = net(encoded)
        gaps = torch.cat([depths[1:] - depths[:-1], torch.tensor([1e10], device=device)])
        alpha = 1 - torch.exp(-F.relu(raw[..., 3]) * gaps)
        weights = alpha * torch.cumprod(torch.cat([torch.ones(6, 1, device=device), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return F.mse_loss((weights[..., None] * raw[..., :3].sigmoid()).sum(1), target)

    fit(net, loss, device)


# ---- agents


def policy_gradient(device: str) -> None:
    policy = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(4):
        position, logs, rewards = 0.0, [], []
        for _ in range(12):
            choice = torch.distributions.Categorical(logits=policy(torch.tensor([position, 1.0], device=device)))
            action = choice.sample()
            logs.append(choice.log_prob(action))
            position += 1.0 if action.item() else -1.0
            rewards.append(-abs(position - 3))
            if position == 3:
                break
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0).to(device)
        loss = -(torch.stack(logs) * (returns - returns.mean()) / (returns.std() + 1e-6)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(len(rewards), position, loss.item())


def deep_q_learning(device: str) -> None:
    import random

    random.seed(1)
    online, target = nn.Linear(4, 2).to(device), nn.Linear(4, 2).to(device)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.AdamW(online.parameters(), lr=1e-2, amsgrad=True)
    memory, state = [], torch.zeros(1, 4, device=device)
    for step in range(30):
        if random.random() < 0.3:
            action = torch.tensor([[random.randrange(2)]], device=device)
        else:
            with torch.no_grad():
                action = online(state).max(1).indices.view(1, 1)
        after = state + (action * 2 - 1) * 0.1 + torch.randn(1, 4, device=device) * 0.01
        done = bool(after.abs().max() > 0.5)
        memory.append(
            (state, action, None if done else after, torch.tensor([1.0 - after.abs().max().item()], device=device))
        )
        state = torch.zeros(1, 4, device=device) if done else after
        if len(memory) >= 8:
            states, actions, following, rewards = zip(*random.sample(memory, 8), strict=True)
            alive = torch.tensor([one is not None for one in following], device=device)
            values = torch.zeros(8, device=device)
            with torch.no_grad():
                values[alive] = target(torch.cat([one for one in following if one is not None])).max(1).values
            loss = F.smooth_l1_loss(
                online(torch.cat(states)).gather(1, torch.cat(actions)), (torch.cat(rewards) + 0.9 * values)[:, None]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for name, p in target.named_parameters():
                p.data.lerp_(online.get_parameter(name).data, 0.1)
    show(len(memory), sum(one[2] is None for one in memory), loss.item())


def actor_critic(device: str) -> None:
    body, actor, critic = nn.Linear(3, 16).to(device), nn.Linear(16, 3).to(device), nn.Linear(16, 1).to(device)
    states, rewards = torch.randn(10, 3, device=device), torch.rand(10, device=device)

    def loss() -> torch.Tensor:
        hidden = body(states).relu()
        choice = torch.distributions.Categorical(actor(hidden).softmax(-1))
        value = critic(hidden)[:, 0]
        advantage = rewards - value.detach()
        return (
            (-choice.log_prob(choice.sample()) * advantage).mean()
            + F.smooth_l1_loss(value, rewards)
            - 0.01 * choice.entropy().mean()
        )

    fit(nn.ModuleList([body, actor, critic]), loss, device)


def proximal_policy(device: str) -> None:
    policy = nn.Linear(4, 3).to(device)
    states, actions, gains = (
        torch.randn(32, 4, device=device),
        torch.randint(0, 3, (32,), device=device),
        torch.randn(32, device=device),
    )
    with torch.no_grad():
        before = policy(states).log_softmax(-1).gather(1, actions[:, None])[:, 0]
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    for epoch in range(20):
        log_p = policy(states).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        ratio = (log_p - before).exp()
        loss = -torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (before - log_p).mean() > 0.05:
            break
    show(epoch, loss.item())


def bandit(device: str) -> None:
    truth, counts, sums = (
        torch.tensor([0.2, 0.5, 0.8], device=device),
        torch.ones(3, device=device),
        torch.zeros(3, device=device),
    )
    for step in range(60):
        arm = (sums / counts + torch.sqrt(2 * math.log(step + 2) / counts)).argmax().item()
        sums[arm] += torch.bernoulli(truth[arm])
        counts[arm] += 1
    print(counts.tolist(), sums.tolist())


def value_iteration(device: str) -> None:
    moves = torch.softmax(torch.randn(6, 3, 6, device=device) * 2, -1)
    rewards, values = torch.randn(6, 3, device=device), torch.zeros(6, device=device)
    for step in range(500):
        new = (rewards + 0.9 * moves @ values).max(1).values
        if (new - values).abs().max() < 1e-5:
            break
        values = new
    show(step, *values.tolist())


def meta_learning(device: str) -> None:
    from torch.func import functional_call, grad, vmap

    model = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(functional_call(model, params, (x,)), y)

    for _ in range(3):
        params = dict(model.named_parameters())
        x, phase = torch.rand(4, 10, 1, device=device) * 6, torch.rand(4, 1, 1, device=device)
        y = torch.sin(x + phase)

        def adapted(x: torch.Tensor, y: torch.Tensor, params: dict[str, torch.Tensor] = params) -> torch.Tensor:
            gradients = grad(loss_of)(params, x[:5], y[:5])
            return loss_of({name: p - 0.1 * gradients[name] for name, p in params.items()}, x[5:], y[5:])

        loss = vmap(adapted)(x, y).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(loss.item())


def evolution(device: str) -> None:
    centre = torch.zeros(5, device=device)
    wanted = torch.linspace(-1, 1, 5, device=device)
    for _ in range(15):
        tries = centre + 0.3 * torch.randn(20, 5, device=device)
        scores = -(tries - wanted).square().sum(1)
        centre = tries[scores.topk(5).indices].mean(0)
    show((centre - wanted).norm().item(), *centre.tolist())


def recommendations(device: str) -> None:
    users, items = nn.Embedding(8, 4).to(device), nn.Embedding(10, 4).to(device)
    user, item = torch.randint(0, 8, (20,), device=device), torch.randint(0, 10, (20,), device=device)
    stars = torch.randint(1, 6, (20,), device=device).float()
    fit(nn.ModuleList([users, items]), lambda: F.mse_loss((users(user) * items(item)).sum(1), stars), device)
    print((users.weight @ items.weight.T).argmax(1))


def message_passing(device: str) -> None:
    source, target = torch.randint(0, 10, (2, 40), device=device)
    message, update = nn.Linear(12, 8).to(device), nn.GRUCell(8, 6).to(device)
    nodes, label = torch.randn(10, 6, device=device), torch.randn(10, 6, device=device)

    def loss() -> torch.Tensor:
        sent = message(torch.cat([nodes[source], nodes[target]], 1)).relu()
        degree = torch.zeros(10, device=device).index_add_(0, target, torch.ones(40, device=device)).clamp(min=1)
        received = torch.zeros(10, 8, device=device).index_add(0, target, sent) / degree[:, None]
        return F.mse_loss(update(received, nodes), label)

    fit(nn.ModuleList([message, update]), loss, device)
