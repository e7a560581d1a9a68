"""The image's recipe: the digest covers exactly what is installed."""

from __future__ import annotations

import io
import shutil
import tarfile

from muster.slurm.image import nvml_stand_in
from muster.slurm.image.recipe import ROOT, TEST_REQUIREMENTS, Recipe, Source, constraints, read_source, requirements


def names(source: Source) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(source.archive)) as archive:
        return set(archive.getnames())


def test_the_source_archive_holds_the_package_with_its_linked_folders_once() -> None:
    inside = names(read_source())
    assert {"pyproject.toml", "install.py", "muster/__init__.py", "muster/slurm/testcluster/spec.py"} <= inside
    assert not [name for name in inside if "__pycache__" in name or name.startswith("slurm/")]
    on_disk = sum(1 for path in (ROOT / "slurm" / "testcluster").glob("*.py"))
    assert len([name for name in inside if name.startswith("muster/slurm/testcluster/")]) >= on_disk


def test_the_stand_in_for_nvidias_library_is_installed_where_there_is_a_compiler() -> None:
    assert (nvml_stand_in.LIBRARY in names(read_source())) == bool(shutil.which("gcc"))


def test_reading_an_unchanged_source_twice_gives_the_same_digest() -> None:
    assert read_source().digest == read_source().digest


def test_another_source_is_another_cluster_image_on_the_same_base() -> None:
    recipe = Recipe()
    assert recipe.cluster_image(Source(b"", "one")) != recipe.cluster_image(Source(b"", "two"))
    assert recipe.base_image == Recipe().base_image


def test_another_debian_is_another_image_all_the_way_up() -> None:
    assert Recipe("forky").debian_image != Recipe("trixie").debian_image
    assert Recipe("forky").base_image != Recipe("trixie").base_image


def test_torch_never_comes_from_the_python_registry() -> None:
    assert not [line for line in constraints().splitlines() if line.startswith("torch==")]
    assert not [line for line in requirements() if line.startswith("torch")]


def test_the_coordinators_requirements_are_in_the_image() -> None:
    assert any(line.startswith("sqlite-utils") for line in requirements())


def test_accounting_is_a_layer_of_its_own() -> None:
    source, plain, accounting = read_source(), Recipe(), Recipe(accounting=True)
    assert accounting.tests_image == plain.tests_image
    assert accounting.cluster_image(source) != plain.cluster_image(source)


def test_an_older_slurm_needs_one_small_layer_on_the_base_of_all_other_tests() -> None:
    source, plain, older = read_source(), Recipe.of("forky"), Recipe.of("trixie", only_slurm=True)
    assert older.base_image == plain.base_image
    assert older.pyslurm is None
    assert older.cluster_image(source) not in (plain.cluster_image(source), Recipe.of("trixie").cluster_image(source))


def test_the_demo_needs_no_layer_of_the_tests() -> None:
    demo, tests = Recipe(for_tests=False), Recipe()
    assert demo.base_image == tests.base_image
    assert not {name for name in TEST_REQUIREMENTS if any(line.startswith(name) for line in requirements())}
    # Another pyslurm is another image for the tests alone.
    older = Recipe(pyslurm="25.11.1"), Recipe(pyslurm="25.11.1", for_tests=False)
    source = Source(b"", "one")
    assert older[0].cluster_image(source) != tests.cluster_image(source)
    assert older[1].cluster_image(source) == demo.cluster_image(source)
