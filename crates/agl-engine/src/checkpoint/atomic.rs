//! A directory that appears whole or not at all.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::EngineError;

/// Writes `files` into a new directory beside `dir` and renames it into place; an existing `dir` is replaced.
///
/// Everything is on disk before the rename. A crash leaves the old directory, or the new one, or (between the two renames
/// of a replacement) the old one under the name `.NAME.old`, which the next write removes.
pub(super) fn write_directory(dir: &Path, files: &[(&str, &[u8])]) -> Result<(), EngineError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| EngineError::Write { path, source }
    };
    let parent = match dir.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (fresh, old) = (parent.join(format!(".{name}.new")), parent.join(format!(".{name}.old")));
    fs::create_dir_all(&parent).map_err(failed(&parent))?;
    remove_if_there(&fresh).map_err(failed(&fresh))?;
    fs::create_dir(&fresh).map_err(failed(&fresh))?;
    for (file, bytes) in files {
        let path = fresh.join(file);
        write_durably(&path, bytes).map_err(failed(&path))?;
    }
    sync(&fresh).map_err(failed(&fresh))?;
    if dir.exists() {
        remove_if_there(&old).map_err(failed(&old))?;
        fs::rename(dir, &old).map_err(failed(dir))?;
    }
    fs::rename(&fresh, dir).map_err(failed(dir))?;
    sync(&parent).map_err(failed(&parent))?;
    remove_if_there(&old).map_err(failed(&old))
}

fn write_durably(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn sync(dir: &Path) -> std::io::Result<()> {
    File::open(dir)?.sync_all()
}

fn remove_if_there(dir: &Path) -> std::io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replacing_a_directory_leaves_only_the_new_files() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("model");
        write_directory(&dir, &[("a", b"1"), ("b", b"2")]).unwrap();
        write_directory(&dir, &[("a", b"3")]).unwrap();
        assert_eq!(fs::read(dir.join("a")).unwrap(), b"3");
        assert!(!dir.join("b").exists());
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1, "no temporary directory is left");
    }
}
