"""Encrypted bundle files: what is stored tells nothing, is the same whoever writes it, and opens whole or not at all."""

from __future__ import annotations

import hmac
import os
import random
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from holdfast.base.config import Config, load
from holdfast.base.errors import ConfigError, CorruptError, NewerFormat, NotProved, VersionNotFound
from holdfast.base.events import Events
from holdfast.cli.stored import versions
from holdfast.core.model import BundleRef, Level, Version
from holdfast.core.recovery.version_choice import Facts, Stored, choose_version, fetches
from holdfast.core.versions.lineage import Lineage
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format import strict_json
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.storage import manifest as manifests
from holdfast.tiers.storage.bundle_files import MAGIC, BundleFiles, Trailer
from holdfast.tiers.storage.encryption import NONCE_BYTES, FileKey, Key, KeySource, Name, load_key
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import BundleFile, Manifest
from holdfast.tiers.storage.version_store import Storage, open_storage
from holdfast.tiers.wire.tls import read_secret
from keeper.rig import reached, rig_in, save_all
from sample_kit import sampled
from tiers.samples import JOB_LAYOUT, bundle, piece, random_image, ref_of, save, verify

V1, V2 = Version(1, 10), Version(1, 20)
SECRET = bytes(range(32))
NAME = Name("job", "v", "b", 100, "d")
# A root with one version of format 2, encrypted with SECRET, as commit 6ea0d44 wrote it.
OLDER = Path(__file__).parent / "format2"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(SECRET.hex() + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def store(tmp_path: Path, key_file: Path) -> Storage:
    made = open_storage(tmp_path / "root", Events(), encryption=KeySource(str(key_file)))
    made.claim()
    made.incarnations.register()
    return made


def reopened(store: Storage, key: str) -> Storage:
    return open_storage(store.where, Events(), encryption=KeySource(key))


def big(store: Storage, version: Version, seed: int = 3) -> BundleFile:
    """A committed version of one bundle of three chunks."""
    rows = 2 * CHUNK_BYTES // 4096 + 5
    one = bundle("big-0", piece("w", "F32", (rows, 1024)))
    image = random_image(one, seed)
    sealed = image_format.seal(one.bundle_id, image)
    stamp = make_stamp(version.incarnation)
    file = store.bundles.write(version, ref_of(one), sealed, memoryview(image), stamp=stamp)
    name, length, digest = store.write_part(version, 0, [file], stamp=stamp)
    store.commit(Manifest(version, store.job_id(), 1, JOB_LAYOUT, None, {name: (length, digest)}), stamp=stamp)
    return store.manifest(version).bundles[0]


def path_of(store: Storage, version: Version, file: BundleFile) -> Path:
    return Path(store.where) / str(version) / file.file


def test_what_is_stored_tells_nothing_and_reads_back(store: Storage) -> None:
    manifest = save(store, V1)
    assert verify(store, V1) == manifest.num_bytes
    for file in manifest.bundles:
        stored = path_of(store, V1, file).read_bytes()
        assert file.file.endswith(".encrypted2")
        assert b"weight" not in stored
        assert b"DCP_SHARDING_INFO" not in stored
        image = store.bundles.image(V1, file)
        view = memoryview(bytearray(file.length))
        store.bundles.read_into(V1, file, view)
        image_format.verify(view, file.seal, "read")
        for entry in image.entries:
            assert store.bundles.read_entry(V1, file, entry) == bytes(view[entry.start : entry.end])
    assert not list((Path(store.where) / str(V1)).glob("*.safetensors")), "stock readers find nothing to misread"


def test_a_large_file_opens_in_pieces_of_any_place(store: Storage) -> None:
    file = big(store, V1)
    whole = memoryview(bytearray(file.length))
    store.bundles.read_into(V1, file, whole)
    image_format.verify(whole, file.seal, "read")
    last = memoryview(bytearray(file.length - 2 * CHUNK_BYTES))
    store.bundles.read_chunks_into(V1, file, 2, last)
    assert last == whole[2 * CHUNK_BYTES :]
    odd = store.bundles._files.read(V1, file, offset=CHUNK_BYTES - 100, length=CHUNK_BYTES + 200)
    assert odd == whole[CHUNK_BYTES - 100 : 2 * CHUNK_BYTES + 100]


def test_whoever_writes_it_writes_the_same_bytes(store: Storage, key_file: Path) -> None:
    files = [big(store, V1), big(reopened(store, str(key_file)), V1)]
    assert files[0] == files[1]
    first = path_of(store, V1, files[0]).read_bytes()
    again = big(store, V2)
    assert again.digest == files[0].digest
    second = path_of(store, V2, again).read_bytes()
    same = sum(a == b for a, b in zip(first[:CHUNK_BYTES:997], second[:CHUNK_BYTES:997], strict=True))
    assert same < 200, "the same content in another version is other ciphertext"


def test_no_two_contents_share_a_key() -> None:
    key = Key(SECRET)
    base = Name("job", "v", "b", 100, "d")
    others = [Name("jobv", "", "b", 100, "d"), Name("job", "w", "b", 100, "d"), Name("job", "v", "c", 100, "d")]
    others += [Name("job", "v", "b", 101, "d"), Name("job", "v", "b", 100, "e")]

    def stored(file: Name, index: int) -> bytes:
        chunk = memoryview(bytearray(64))
        key.of_file(file).encrypt(index, chunk)
        return bytes(chunk)

    streams = [stored(name, index) for name in (base, *others) for index in (0, 1)]
    assert len(set(streams)) == len(streams)


def with_one_digest() -> tuple[bytes, bytes]:
    """Returns two contents of 4096 bytes with one XXH3-128.

    The hash multiplies the halves of each lane of 8 bytes, XORed with its public secret, and adds the lane to its neighbour.
    Where the low half is the secret's the product is zero whatever the high half is, and two such lanes have one sum.
    """
    found = []
    for high in (1, 2):
        content = bytearray(4096)
        content[0:8] = bytes.fromhex("b8fe6c39") + high.to_bytes(4, "little")
        content[64:72] = bytes.fromhex("7c01812c") + (100 - high).to_bytes(4, "little")
        found.append(bytes(content))
    return found[0], found[1]


def crossed(first: bytes, second: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(first, second, strict=True))


def test_contents_with_one_digest_share_no_nonce(store: Storage) -> None:
    """Of two files with one name, XOR of the ciphertexts tells nothing of the plain texts."""
    contents = with_one_digest()
    assert contents[0] != contents[1]
    assert xxhash.xxh3_128_digest(contents[0]) == xxhash.xxh3_128_digest(contents[1])
    stored = []
    for content in contents:
        seal = image_format.seal("b", content)
        file = store.bundles.write(
            V1, BundleRef("b", (0,), 0, 1, 4096, "f"), seal, memoryview(content), stamp=make_stamp(1)
        )
        stored.append(path_of(store, V1, file).read_bytes())
        view = memoryview(bytearray(4096))
        store.bundles._files._last = None
        store.bundles.read_into(V1, file, view)
        assert bytes(view) == content
    assert crossed(stored[0][:4096], stored[1][:4096]) != crossed(*contents)
    locks = [Trailer.decode(data[4096:], file.file).locks[0] for data in stored]
    assert locks[0][:NONCE_BYTES] != locks[1][:NONCE_BYTES]


def test_equal_chunks_of_one_file_are_stored_unlike() -> None:
    key = Key(SECRET).of_file(Name("job", "v", "b", 2 * CHUNK_BYTES, "d"))
    chunks = [memoryview(bytearray(4096)) for _ in range(2)]
    locks = [key.encrypt(index, chunk) for index, chunk in enumerate(chunks)]
    assert locks[0] != locks[1]
    assert bytes(chunks[0]) != bytes(chunks[1])


def test_ranks_with_other_bytes_under_one_name_share_no_nonce(store: Storage) -> None:
    """Twins should hold the same. Where they do not, and one seal is believed of both, the second is refused."""
    source = random.Random(9)
    good = bytearray(source.randbytes(CHUNK_BYTES + 4096))
    seal, ref = image_format.seal("b", good), BundleRef("b", (0, 1), 0, 1, len(good), "f")
    file = BundleFile.of(ref, seal, store.bundles._files.key_id)
    other = bytearray(good)
    other[CHUNK_BYTES + 5] ^= 1
    written: list[list[bytes]] = []
    for view in (good, other):
        taken: list[bytes] = []
        try:
            taken.extend(map(bytes, store.bundles._files.chunks(V1, file, memoryview(view))))
        except CorruptError:
            taken.append(b"refused")
        written.append(taken)
    assert written[0][0] == written[1][0], "the first chunk is the same, so it is stored alike"
    assert written[1][1:] == [b"refused"]


def test_memory_that_changes_meanwhile_meets_no_nonce_of_other_bytes(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is written to the image once a chunk was taken, nonce, proof and ciphertext are of the bytes that were taken."""
    image = bytearray(random.Random(4).randbytes(4096))
    before = bytes(image)
    seal, ref = image_format.seal("b", image), BundleRef("b", (0,), 0, 1, 4096, "f")
    honest = FileKey.encrypt

    def late(key: FileKey, index: int, chunk: memoryview) -> bytes:
        image[100:200] = bytes(100)
        return honest(key, index, chunk)

    monkeypatch.setattr(FileKey, "encrypt", late)
    file = store.bundles.write(V1, ref, seal, memoryview(image), stamp=make_stamp(1))
    view = memoryview(bytearray(4096))
    store.bundles.read_into(V1, file, view)
    assert bytes(image) != before
    assert bytes(view) == before


@pytest.mark.parametrize("missing", ["content", "number", "key"])
def test_a_nonce_that_leaves_something_out_is_missed(missing: str) -> None:
    """A planted bug each: the nonces of what must differ are then the same."""

    class Planted(FileKey):
        def encrypt(self, index: int, chunk: memoryview) -> bytes:
            if missing == "number":
                return super().encrypt(0, chunk)
            made = self._mac.copy() if missing == "content" else hmac.new(b"", digestmod="sha256")
            made.update(index.to_bytes(NONCE_BYTES, "big"))
            made.update(chunk if missing == "key" else b"")
            return made.digest()[:NONCE_BYTES] + bytes(16)

    def nonces(kind: type[FileKey]) -> list[bytes]:
        cases = [(1, 0, b"a"), (1, 0, b"b"), (1, 1, b"a"), (2, 0, b"a")]
        made = [
            kind(bytes(32), bytes([secret]) * 32, NAME).encrypt(i, memoryview(bytearray(c))) for secret, i, c in cases
        ]
        return [lock[:NONCE_BYTES] for lock in made]

    assert len(set(nonces(FileKey))) == 4
    assert len(set(nonces(Planted))) < 4


# Format 2, as earlier releases wrote it.


def test_versions_of_format_2_are_read_verified_and_retired(tmp_path: Path, key_file: Path) -> None:
    root = tmp_path / "older"
    shutil.copytree(OLDER, root)
    for directory in (root, *root.glob("**/")):
        directory.chmod(0o700)
    store = open_storage(root, Events(), encryption=KeySource(str(key_file)))
    (version,) = store.versions()
    manifest = store.manifest(version)
    assert manifest.proved_format == 2
    assert manifests.encode_root(manifest) == (root / str(version) / "manifest.json").read_bytes()
    assert all(file.is_older for file in manifest.bundles)
    for file in manifest.bundles:
        view = memoryview(bytearray(file.length))
        store.bundles.read_into(version, file, view)
        image_format.verify(view, file.seal, "read")
        store.bundles.verify(version, file)
        reopened(store, "").bundles.verify(version, file)
        path = path_of(store, version, file)
        good = path.read_bytes()
        path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        with pytest.raises(CorruptError, match="changed, or belongs elsewhere"):
            store.bundles.read_into(version, file, view)
        path.write_bytes(good)
    save(store, V2)
    assert store.manifest(V2).proved_format == 3
    store.retire(version)
    assert store.versions() == [V2]
    assert not (root / str(version)).exists()


def test_what_is_left_of_a_version_of_format_2_is_discarded(tmp_path: Path, key_file: Path) -> None:
    root = tmp_path / "older"
    shutil.copytree(OLDER, root)
    store = open_storage(root, Events(), encryption=KeySource(str(key_file)))
    (version,) = store.versions()
    (root / str(version) / "manifest.json").unlink()
    store.discard(version)
    assert not (root / str(version)).exists()


def test_a_file_is_not_read_in_the_form_of_the_other(store: Storage) -> None:
    """Who renames one, and lists it so, gets nothing of it."""
    file = big(store, V1)
    older = replace(file, file=file.file.removesuffix("2"))
    path_of(store, V1, file).rename(path_of(store, V1, older))
    with pytest.raises(CorruptError):
        store.bundles._files.read(V1, older, length=10)


def test_another_key_or_none_is_refused_by_name(store: Storage, tmp_path: Path) -> None:
    file = big(store, V1)
    other = tmp_path / "other"
    other.write_bytes(bytes(32))
    other.chmod(0o600)
    view = memoryview(bytearray(file.length))
    for setting, words in (("", "no key is given"), (str(other), "the key given is")):
        stranger = reopened(store, setting)
        with pytest.raises(ConfigError, match=f"{file.key_id}; {words}"):
            stranger.bundles.read_into(V1, file, view)
        stranger.bundles.verify(V1, file)  # that it is undamaged can be told without the key


@pytest.mark.parametrize("keyless", sampled([False, True], False))
def test_every_change_of_an_encrypted_file_is_found(store: Storage, keyless: bool) -> None:
    file = big(store, V1)
    reader = reopened(store, "") if keyless else store
    path, source = path_of(store, V1, file), random.Random(5)
    good = path.read_bytes()
    places = [source.randrange(len(good)) for _ in range(20)] + [0, file.length - 1, file.length, len(good) - 1]
    damages = [good[:at] + bytes([good[at] ^ (1 << source.randrange(8))]) + good[at + 1 :] for at in places]
    damages += [good[: source.randrange(len(good))] for _ in range(5)] + [good + b"x", b"", good[:-1]]
    damages.append(good[CHUNK_BYTES : 2 * CHUNK_BYTES] + good[:CHUNK_BYTES] + good[2 * CHUNK_BYTES :])
    for damaged in damages:
        path.write_bytes(damaged)
        fresh = reopened(reader, "") if keyless else reader
        fresh.bundles._files._last = None
        with pytest.raises(CorruptError):
            fresh.bundles.verify(V1, file)
    path.write_bytes(good)
    reader.bundles._files._last = None
    reader.bundles.verify(V1, file)


def test_an_attacker_without_the_key_cannot_move_chunks_or_splice_versions(store: Storage) -> None:
    """Trailers carry no secret, so anybody can make one that fits; the tags are what does not."""
    file, other = big(store, V1), big(store, V2)
    good, path = path_of(store, V1, file).read_bytes(), path_of(store, V1, file)
    data, spliced = good[: file.length], path_of(store, V2, other).read_bytes()[: file.length]
    locks = Trailer.decode(good[file.length :], file.file).locks
    foreign = Trailer.decode(path_of(store, V2, other).read_bytes()[file.length :], other.file).locks
    swapped = data[CHUNK_BYTES : 2 * CHUNK_BYTES] + data[:CHUNK_BYTES] + data[2 * CHUNK_BYTES :]
    for bytes_of, forged in ((swapped, (locks[1], locks[0], locks[2])), (spliced, foreign)):
        chunks = [bytes_of[at : at + CHUNK_BYTES] for at in range(0, len(bytes_of), CHUNK_BYTES)]
        digest = xxhash.xxh3_128_digest(b"".join(map(xxhash.xxh3_128_digest, chunks)))
        path.write_bytes(bytes_of + Trailer(file.key_id, file.length, forged, digest).encode(file.file))
        store.bundles._files._last = None
        reopened(store, "").bundles.verify(V1, file)  # without the key it looks well
        with pytest.raises(CorruptError, match="changed, or belongs elsewhere"):
            store.bundles.verify(V1, file)


def test_an_unfinished_encrypted_version_is_discarded(store: Storage) -> None:
    file = big(store, V1)
    directory = Path(store.where) / str(V1)
    (directory / "manifest.json").unlink()
    foreign = directory / file.file.replace("big-0", "other")
    foreign.write_bytes(MAGIC * 100)
    store.discard(V1)
    assert [path.name for path in directory.iterdir()] == [foreign.name], "what is not proved to be ours stays"


def test_a_sparse_file_of_somebody_else_is_not_read_for_its_trailer() -> None:
    asked: list[int] = []

    class Sparse:
        properties = LocalBackend(Path("/nowhere")).properties

        def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
            asked.append(length or 0)
            raise VersionNotFound(name)

    files = BundleFiles(Sparse(), None, str)  # type: ignore[arg-type]
    for ending in ("encrypted", "encrypted2"):
        name = f"b-{'0' * 32}.{'1' * 16}.{ending}"
        for size in range(1 << 60, (1 << 60) + (8 << 20), 65_521):
            assert not files.looks_ours(V1, name, size)
    assert max(asked, default=0) <= 16 << 20


# Where keys come from.


def test_keys_come_from_private_files_and_commands(tmp_path: Path, key_file: Path) -> None:
    from_file = load_key(str(key_file))
    assert from_file is not None
    raw = tmp_path / "raw"
    raw.write_bytes(SECRET)
    raw.chmod(0o600)
    for setting in (str(raw), f"!cat {key_file}"):
        found = load_key(setting)
        assert found is not None
        assert found.id == from_file.id
    assert load_key("") is None
    assert SECRET.hex() not in repr(from_file)


def test_bad_keys_are_refused_without_telling_them(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("5ec12e7" * 9)
    path.chmod(0o644)
    for mode, words in ((0o644, "open to others"), (0o600, "neither 64 hex digits")):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=words) as caught:
            load_key(str(path))
        assert "5ec12e7" not in str(caught.value)
    for setting, words in (
        (str(tmp_path / "none"), "cannot be read"),
        ("!false --token=5ec12e7", "ended with 1"),
        ("!/no/such/program 5ec12e7", "failed"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            load_key(setting)
        assert "5ec12e7" not in str(caught.value)


@pytest.mark.root
@pytest.mark.parametrize("read", [load_key, read_secret], ids=["key", "secret"])
def test_a_private_file_of_another_user_is_refused_though_root_can_read_it(
    tmp_path: Path, read: Callable[[str], object]
) -> None:
    path = tmp_path / "key"
    path.write_text(SECRET.hex())
    path.chmod(0o600)
    assert read(str(path)) is not None
    os.chown(path, 65534, 65534)
    with pytest.raises(ConfigError):
        read(str(path))


def test_a_key_in_place_of_its_files_name_is_not_repeated() -> None:
    """An easy slip; errors go where others read them."""
    key = "5ec12e7a" * 8
    mistakes: list[Callable[[], object]] = [
        lambda: load_key(KeySource.of(Config(encryption_key=key)).setting),
        lambda: load_key(f"!{key}"),
        lambda: read_secret(key),
        lambda: load({"encryption_key": [key]}, environ={}),
    ]
    for mistake in mistakes:
        with pytest.raises(ConfigError) as caught:
            mistake()
        assert key not in "".join(traceback.format_exception(caught.value))


# The whole way.


def test_keepers_write_and_read_encrypted_versions(tmp_path: Path, key_file: Path) -> None:
    with rig_in(tmp_path, num_nodes=2, encryption_key=str(key_file)) as rig:
        trainers = rig.start()
        version = save_all(trainers, 7, durable=True)
        reached(trainers, version, Level.DURABLE)
        found = rig.storage.manifest(version)
        assert all(file.key_id for file in found.bundles)
        saved = {item.seal.digest for item in found.bundles}
        arguments = Path(f"/proc/{trainers[0].client.welcome.pid}/cmdline").read_bytes()
        assert SECRET.hex().encode() not in arguments
    fresh = tmp_path / "again"
    fresh.mkdir()
    with rig_in(fresh, num_nodes=2, encryption_key=str(key_file), root=rig.root) as rig:
        rig.next_incarnation(version)
        assembly = rig.assembly()
        table = tuple(file.ref for file in found.bundles)
        stored = Stored(version, 2, table, {file.ref.bundle_id: file.seal for file in found.bundles})
        facts = Facts((), {}, {version: stored}, Lineage(), rig.topology)
        choice = choose_version(facts, wanted=version).value
        assert choice is not None
        trainer = rig.trainer(0)
        trainer.join(assembly, prepare=False)
        wanted = [fetch for fetch in fetches(choice, 0, facts) if fetch.via is None]
        for item in trainer.client.obtain(version, wanted, timeout_s=20):
            image_format.verify(item.view, item.seal, "obtained")
            assert item.seal.digest in saved


def test_commands_take_the_key_from_the_settings_file(tmp_path: Path, store: Storage, key_file: Path) -> None:
    save(store, V1)
    settings = tmp_path / "settings.toml"
    settings.write_text(f'encryption_key = "{key_file}"\n')
    command = [sys.executable, "-m", "holdfast.cli.cli", "inspect", store.where]
    run = f"import sys; from holdfast.cli.cli import app; app({command[3:]!r})"
    with_key = subprocess.run(
        [sys.executable, "-c", run], env={"HOLDFAST_CONFIG": str(settings), "PATH": ""}, capture_output=True, text=True
    )
    assert with_key.returncode == 0, with_key.stderr
    assert "weight" in with_key.stdout


@pytest.mark.parametrize("with_key", ["none", "another"])
def test_a_version_that_somebody_without_the_key_made_is_refused(store: Storage, tmp_path: Path, with_key: str) -> None:
    save(store, V1)
    if with_key == "none":
        forger = reopened(store, "")
    else:
        other = tmp_path / "other"
        other.write_text(bytes(32).hex())
        other.chmod(0o600)
        forger = reopened(store, str(other))
    save(forger, V2, seed=99)

    assert forger.manifest(V2).version == V2
    if with_key == "none":
        with pytest.raises(CorruptError, match="plain") as caught:
            store.manifest(V2)
        assert "encryption_required" in caught.value.remedy
    else:
        assert not any(store.bundles.opens(file) for file in store.manifest(V2).bundles)
    assert store.manifest(V1).version == V1


def test_a_plain_bundle_beside_one_of_another_key_is_refused(store: Storage, tmp_path: Path) -> None:
    """The id of a key stands in a name, and whoever writes a manifest chooses names."""
    save(store, V1)
    other = tmp_path / "other"
    other.write_text(bytes(32).hex())
    other.chmod(0o600)
    stamp, files = make_stamp(V2.incarnation), []
    for forger, name in ((reopened(store, ""), "a-0"), (reopened(store, str(other)), "zz-0")):
        one = bundle(name, piece("w", "F32", (4, 4)))
        image = random_image(one, 7)
        sealed = image_format.seal(one.bundle_id, image)
        files.append(forger.bundles.write(V2, ref_of(one), sealed, memoryview(image), stamp=stamp))
    for committer in (reopened(store, ""), reopened(store, str(other))):
        name, length, digest = committer.write_part(V2, 0, files, stamp=stamp)
        committer.commit(Manifest(V2, store.job_id(), 1, JOB_LAYOUT, None, {name: (length, digest)}), stamp=stamp)
        with pytest.raises(CorruptError, match=r"a key is required|does not have the key"):
            store.manifest(V2)
        (Path(store.where) / str(V2) / "manifest.json").unlink()
    assert store.manifest(V1).version == V1


def test_a_manifest_that_was_changed_is_refused_by_who_has_the_key(store: Storage) -> None:
    """All its checksums fit: they need no key."""
    save(store, V1)
    root = Path(store.where) / str(V1) / "manifest.json"
    good = root.read_bytes()
    honest = manifests.decode_root(good, "root")
    assert len(honest.mac) == 64

    for changed in (
        replace(honest, layout="e" * 32),
        replace(honest, world_size=honest.world_size + 1),
        replace(honest, resumed_from=Version(0, 1)),
        replace(honest, mac="0" * 64),
    ):
        root.write_bytes(manifests.encode_root(changed))
        with pytest.raises(CorruptError, match="does not have the key"):
            store.manifest(V1)
    root.write_bytes(manifests.encode_root(replace(honest, mac="")))
    with pytest.raises(CorruptError, match="not authenticated"):
        store.manifest(V1)
    assert reopened(store, "").manifest(V1).version == V1, "who has no key can look, and proves nothing"
    root.write_bytes(good)
    assert store.manifest(V1).mac == honest.mac


def test_a_job_that_began_without_a_key_comes_back_when_it_says_so(tmp_path: Path, key_file: Path) -> None:
    plain = open_storage(tmp_path / "root", Events(), encryption=KeySource())
    plain.claim()
    plain.incarnations.register()
    save(plain, V1)
    for required in (True, False):
        with_key = (
            reopened(plain, str(key_file))
            if required
            else open_storage(plain.where, Events(), encryption=KeySource(str(key_file), required=False))
        )
        if required:
            with pytest.raises(NotProved, match="a key is required"):
                with_key.manifest(V1)
            verdict = versions.examine(with_key, V1)
            assert verdict.state == "not proved with the key", "who reads `damaged` removes it, and it is good"
        else:
            assert with_key.manifest(V1).version == V1
            save(with_key, V2)
            assert with_key.manifest(V2).mac


def test_a_root_of_a_newer_format_is_told_by_older_readers() -> None:
    proved = manifests.encode_root(
        Manifest(V1, "ab" * 8, 1, "l", None, {"manifest-0.json": (1, "0" * 32)}, mac="0" * 64)
    )
    assert b'"format_version":3' in proved
    with pytest.raises(NewerFormat):
        strict_json.decode_record(proved, manifests._Root, "as a reader that knows format 1")
