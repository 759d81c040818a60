"""Crops and flips: what a loop over images computes with padding and slicing."""

import pytest
import torch
import torch.nn.functional as F

from fedbatchnorm.data.augment import augment, random_augment


def twin(x, shifts, flips):
    """One image after the other, as torchvision's RandomCrop(padding=4) and RandomHorizontalFlip do it."""
    h, w = x.shape[2:]
    out = []
    for image, (down, right), flip in zip(x, shifts.tolist(), flips.tolist(), strict=True):
        crop = F.pad(image, (4, 4, 4, 4))[:, down : down + h, right : right + w]
        out.append(crop.flip(2) if flip else crop)
    return torch.stack(out)


def images(n, shape, dtype, generator):
    x = torch.randint(1, 256, (n, *shape), generator=generator)
    return x.to(dtype) if dtype == torch.uint8 else x.to(dtype) / 7


def draws(n, generator):
    return torch.randint(9, (n, 2), generator=generator), torch.rand(n, generator=generator) < 0.5


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8), (2, 6, 9), (1, 3, 2)])
def test_it_is_what_a_loop_computes(generator, shape, dtype):
    x = images(64, shape, dtype, generator)
    shifts, flips = draws(64, generator)
    before = x.clone()
    result = augment(x, shifts, flips)
    assert result.dtype == dtype
    assert torch.equal(result, twin(x, shifts, flips))
    assert torch.equal(x, before)


def test_every_shift_and_flip(generator):
    grid = torch.cartesian_prod(torch.arange(9), torch.arange(9), torch.arange(2))
    x = images(len(grid), (2, 11, 13), torch.uint8, generator)
    shifts, flips = grid[:, :2], grid[:, 2].bool()
    assert torch.equal(augment(x, shifts, flips), twin(x, shifts, flips))
    still = torch.full_like(shifts, 4)
    assert torch.equal(augment(x, still, torch.zeros_like(flips)), x)
    assert torch.equal(augment(x, still, torch.ones_like(flips)), x.flip(3))


def test_padding_is_black_whatever_the_pixels_are():
    x = torch.full((1, 1, 6, 6), float("inf"))
    result = augment(x, torch.tensor([[8, 0]]), torch.tensor([False]))
    assert result[0, 0, :2, 4:].isinf().all()
    assert result.isinf().sum() == 4
    assert result[~result.isinf()].eq(0).all()


def test_other_layouts_and_no_images_at_all(generator):
    x = images(10, (3, 8, 8), torch.uint8, generator)
    shifts, flips = draws(10, generator)
    result = twin(x, shifts, flips)
    assert torch.equal(augment(x.to(memory_format=torch.channels_last), shifts, flips), result)
    assert torch.equal(augment(x, shifts.to(torch.uint8), flips), result)
    assert augment(x[:0], shifts[:0], flips[:0]).shape == (0, 3, 8, 8)


def test_vmap_over_clients_is_a_loop_over_clients(generator):
    x = images(12, (3, 8, 8), torch.uint8, generator).view(3, 4, 3, 8, 8)
    shifts, flips = draws(12, generator)
    result = torch.func.vmap(augment)(x, shifts.view(3, 4, 2), flips.view(3, 4))
    assert torch.equal(result.flatten(0, 1), twin(x.flatten(0, 1), shifts, flips))
    alike = torch.func.vmap(random_augment, randomness="same")(x[:1].expand_as(x))
    assert torch.equal(alike[0], alike[1])
    apart = torch.func.vmap(random_augment, randomness="different")(x[:1].expand_as(x))
    assert not torch.equal(apart[0], apart[1])


def test_it_compiles_as_one_graph(generator):
    x = images(6, (3, 8, 8), torch.uint8, generator)
    shifts, flips = draws(6, generator)
    compiled = torch.compile(augment, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, shifts, flips), twin(x, shifts, flips))
    torch.compile(random_augment, fullgraph=True, backend="aot_eager")(x)


def test_draws_are_uniform_and_come_from_the_default_generator():
    """A lone pixel in the middle says where its image went: 81 places and, off the axis, two sides."""
    x = torch.zeros(80_000, 1, 12, 12, dtype=torch.uint8)
    x[:, 0, 5, 5] = 1
    x[:, 0, 5, 6] = 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        one = random_augment(x)
        torch.manual_seed(1)
        assert torch.equal(random_augment(x), one)
        assert not torch.equal(random_augment(x), one)
    places = (one == 1).sum(0)[0]
    where = (one == 1).flatten(1).int().argmax(1)
    flipped = (one == 2).flatten(1).int().argmax(1) < where
    assert flipped.double().mean().item() == pytest.approx(0.5, abs=0.01)
    down = places.sum(1)
    assert down.nonzero().flatten().tolist() == list(range(1, 10))
    assert (down[1:10] / 80_000).tolist() == pytest.approx([1 / 9] * 9, abs=0.005)
    for side in (False, True):
        right = torch.bincount(where[flipped == side] % 12, minlength=12).double()
        first = 2 if side else 1
        assert right.nonzero().flatten().tolist() == list(range(first, first + 9))
        assert (right[first : first + 9] / right.sum()).tolist() == pytest.approx([1 / 9] * 9, abs=0.007)


@pytest.mark.parametrize(
    ("shifts", "flips"), [((4, 2), (3,)), ((3,), (3,)), ((3, 2), (3, 1)), ((1, 2), (3,))]
)
def test_draws_for_another_number_of_images_are_refused(shifts, flips):
    with pytest.raises(ValueError, match=r"for 3 images, shifts must be \(3, 2\) and flips \(3,\)"):
        augment(torch.zeros(3, 1, 8, 8), torch.zeros(shifts, dtype=torch.long), torch.zeros(flips) > 0)


@pytest.mark.gpu
def test_a_cuda_graph_draws_anew_at_each_replay(generator):
    x = images(64, (3, 32, 32), torch.uint8, generator).cuda()
    shifts, flips = (t.cuda() for t in draws(64, generator))
    expected = twin(x, shifts, flips)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        augment(x, shifts, flips)
        random_augment(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given, drawn = augment(x, shifts, flips), random_augment(x)
    graph.replay()
    first = drawn.clone()
    assert torch.equal(given, expected)
    graph.replay()
    assert not torch.equal(drawn, first)
    compiled = torch.compile(augment, fullgraph=True)
    assert torch.equal(compiled(x, shifts, flips), expected)
