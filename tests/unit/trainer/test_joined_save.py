"""Files of two models in one checkpoint: names, joint proof, and separation when loading."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.trainer.checkpoints import JoinedSave, split_files
from mcore_rl.types import SavedFile, SavedState

ACTOR = (SavedFile("a.distcp", 3, 1), SavedFile("hf/config.json", 2, 5))
CRITIC = (SavedFile("a.distcp", 4, 2), SavedFile("hf/config.json", 2, 6))


@dataclass
class Part:
    """Save that has finished, or not."""

    files: tuple[SavedFile, ...]
    is_done: bool = True

    def done(self) -> bool:
        return self.is_done

    def result(self) -> SavedState:
        return SavedState(self.files, {"tensors": len(self.files)})


def test_joined_save_file_names_round_trip() -> None:
    saved = JoinedSave({"": Part(ACTOR), "critic": Part(CRITIC)}).result()
    assert [file.name for file in saved.files][2:] == ["critic/a.distcp", "critic/hf/config.json"]
    assert saved.description == {"tensors": 2, "critic": {"tensors": 2}}
    own, critics = split_files(saved.files, "critic")
    assert (tuple(own), tuple(critics)) == (ACTOR, CRITIC)


def test_split_files_similar_directory_name_is_not_matched() -> None:
    own, critics = split_files([SavedFile("critics.json", 1, 1)], "critic")
    assert (len(own), critics) == (1, [])


def test_joined_save_is_done_when_all_parts_are() -> None:
    assert JoinedSave({"": Part(ACTOR), "critic": Part(CRITIC)}).done()
    assert not JoinedSave({"": Part(ACTOR), "critic": Part(CRITIC, is_done=False)}).done()
