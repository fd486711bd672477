"""Encrypted bundle files: what is stored tells nothing, is the same whoever writes it, and opens whole or not at all."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from holdfast.base.errors import ConfigError, CorruptError, NewerFormat, VersionNotFound
from holdfast.base.events import Events
from holdfast.core.model import Level, Version
from holdfast.core.recovery.version_choice import Facts, Stored, choose_version, fetches
from holdfast.core.versions.lineage import Lineage
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format import strict_json
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.storage import manifest as manifests
from holdfast.tiers.storage.bundle_files import MAGIC, BundleFiles, Trailer
from holdfast.tiers.storage.encryption import Key, KeySource, Name, load_key
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import BundleFile, Manifest
from holdfast.tiers.storage.version_store import Storage, open_storage
from keeper.rig import reached, rig_in, save_all
from tiers.samples import JOB_LAYOUT, bundle, piece, random_image, ref_of, save, verify

V1, V2 = Version(1, 10), Version(1, 20)
SECRET = bytes(range(32))


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
    made.register_incarnation()
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
    file = store.write_bundle(version, ref_of(one), sealed, memoryview(image), stamp=stamp)
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
        assert file.file.endswith(".encrypted")
        assert b"weight" not in stored
        assert b"DCP_SHARDING_INFO" not in stored
        image = store.image(V1, file)
        view = memoryview(bytearray(file.length))
        store.read_bundle_into(V1, file, view)
        image_format.verify(view, file.seal, "read")
        for entry in image.entries:
            assert store.read_entry(V1, file, entry) == bytes(view[entry.start : entry.end])
    assert not list((Path(store.where) / str(V1)).glob("*.safetensors")), "stock readers find nothing to misread"


def test_a_large_file_opens_in_pieces_of_any_place(store: Storage) -> None:
    file = big(store, V1)
    whole = memoryview(bytearray(file.length))
    store.read_bundle_into(V1, file, whole)
    image_format.verify(whole, file.seal, "read")
    last = memoryview(bytearray(file.length - 2 * CHUNK_BYTES))
    store.read_chunks_into(V1, file, 2, last)
    assert last == whole[2 * CHUNK_BYTES :]
    odd = store._files.read(V1, file, offset=CHUNK_BYTES - 100, length=CHUNK_BYTES + 200)
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
    plain = memoryview(bytes(64))

    def stored(file: Name, index: int) -> bytes:
        into = memoryview(bytearray(64))
        key.of_file(file).encrypt(index, plain, into)
        return bytes(into)

    streams = [stored(name, index) for name in (base, *others) for index in (0, 1)]
    assert len(set(streams)) == len(streams)


def test_another_key_or_none_is_refused_by_name(store: Storage, tmp_path: Path) -> None:
    file = big(store, V1)
    other = tmp_path / "other"
    other.write_bytes(bytes(32))
    other.chmod(0o600)
    view = memoryview(bytearray(file.length))
    for setting, words in (("", "no key is given"), (str(other), "the key given is")):
        stranger = reopened(store, setting)
        with pytest.raises(ConfigError, match=f"{file.key_id}; {words}"):
            stranger.read_bundle_into(V1, file, view)
        stranger.verify_bundle(V1, file)  # that it is undamaged can be told without the key


@pytest.mark.parametrize("keyless", [False, True])
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
        fresh._files._last = None
        with pytest.raises(CorruptError):
            fresh.verify_bundle(V1, file)
    path.write_bytes(good)
    reader._files._last = None
    reader.verify_bundle(V1, file)


def test_an_attacker_without_the_key_cannot_move_chunks_or_splice_versions(store: Storage) -> None:
    """Trailers carry no secret, so anybody can make one that fits; the tags are what does not."""
    file, other = big(store, V1), big(store, V2)
    good, path = path_of(store, V1, file).read_bytes(), path_of(store, V1, file)
    data, spliced = good[: file.length], path_of(store, V2, other).read_bytes()[: file.length]
    tags = Trailer.decode(good[file.length :], file.file).tags
    foreign = Trailer.decode(path_of(store, V2, other).read_bytes()[file.length :], other.file).tags
    swapped = data[CHUNK_BYTES : 2 * CHUNK_BYTES] + data[:CHUNK_BYTES] + data[2 * CHUNK_BYTES :]
    for bytes_of, forged in ((swapped, (tags[1], tags[0], tags[2])), (spliced, foreign)):
        chunks = [bytes_of[at : at + CHUNK_BYTES] for at in range(0, len(bytes_of), CHUNK_BYTES)]
        digest = xxhash.xxh3_128_digest(b"".join(map(xxhash.xxh3_128_digest, chunks)))
        path.write_bytes(bytes_of + Trailer(file.key_id, file.length, forged, digest).encode(file.file))
        store._files._last = None
        reopened(store, "").verify_bundle(V1, file)  # without the key it looks well
        with pytest.raises(CorruptError, match="changed, or belongs elsewhere"):
            store.verify_bundle(V1, file)


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
    name = f"b-{'0' * 32}.{'1' * 16}.encrypted"
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


# The whole way.


def test_keepers_write_and_read_encrypted_versions(tmp_path: Path, key_file: Path) -> None:
    with rig_in(tmp_path, num_nodes=2, encryption_key=str(key_file)) as rig:
        trainers = rig.start()
        version = save_all(trainers, 7, durable=True)
        reached(trainers, version, Level.DURABLE)
        found = rig.storage.manifest(version)
        assert all(file.key_id for file in found.bundles)
        saved = {item.seal.digest for item in found.bundles}
        arguments = Path(f"/proc/{trainers[0].client.pid}/cmdline").read_bytes()
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
        assert not any(store.opens(file) for file in store.manifest(V2).bundles)
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
    plain.register_incarnation()
    save(plain, V1)
    for required in (True, False):
        with_key = (
            reopened(plain, str(key_file))
            if required
            else open_storage(plain.where, Events(), encryption=KeySource(str(key_file), required=False))
        )
        if required:
            with pytest.raises(CorruptError, match="a key is required"):
                with_key.manifest(V1)
        else:
            assert with_key.manifest(V1).version == V1
            save(with_key, V2)
            assert with_key.manifest(V2).mac


def test_a_root_of_a_newer_format_is_told_by_older_readers() -> None:
    proved = manifests.encode_root(
        Manifest(V1, "ab" * 8, 1, "l", None, {"manifest-0.json": (1, "0" * 32)}, mac="0" * 64)
    )
    assert b'"format_version":2' in proved
    with pytest.raises(NewerFormat):
        strict_json.decode_record(proved, manifests._Root, "as a reader that knows format 1")
