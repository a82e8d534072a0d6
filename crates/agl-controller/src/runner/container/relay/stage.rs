//! The folder that containers see: the program that is the relay, and what it needs to run in any image.

use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::INSIDE;

const PROGRAM: &str = "agl";
const LOADER: &str = "ld.so";
/// In the head of a program for 64 bits.
const INTERPRETER: u32 = 3;

/// Puts the program into the folder, with its loader and libraries where it has any, and tells how it is started inside.
///
/// # Errors
/// What the file system says.
pub(super) fn furnish(folder: &Path, program: &Path) -> io::Result<Vec<String>> {
    let libraries = folder.join("lib");
    fs::create_dir_all(&libraries)?;
    for open in [folder, &libraries] {
        fs::set_permissions(open, Permissions::from_mode(0o755))?;
    }
    let ours = folder.join(PROGRAM);
    copy(program, &ours)?;
    // From here on it is the copy that counts: a program may run whose own file has been replaced.
    let program = ours.as_path();
    let inside = format!("{INSIDE}/{PROGRAM}");
    let Some(loader) = interpreter(program)? else { return Ok(vec![inside]) };
    copy(&loader, &libraries.join(LOADER))?;
    let listed = Command::new(&loader).arg("--list").arg(program).output()?;
    if !listed.status.success() {
        let reason = String::from_utf8_lossy(&listed.stderr).trim().to_owned();
        return Err(io::Error::other(format!("{} --list {}: {reason}", loader.display(), program.display())));
    }
    for (name, path) in libraries_of(&String::from_utf8_lossy(&listed.stdout)) {
        copy(Path::new(&path), &libraries.join(name))?;
    }
    let folder = format!("{INSIDE}/lib");
    Ok(vec![format!("{folder}/{LOADER}"), "--library-path".to_owned(), folder, inside])
}

/// Links or copies what is not there already. What runs from an older file keeps it.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let (wanted, there) = (fs::metadata(from)?, fs::metadata(to));
    let is_the_same = |there: fs::Metadata| {
        let same_time = matches!((there.modified(), wanted.modified()), (Ok(one), Ok(other)) if one == other);
        there.len() == wanted.len() && same_time
    };
    if there.is_ok_and(is_the_same) {
        return Ok(());
    }
    let new = to.with_extension("new");
    let _ = fs::remove_file(&new);
    let is_for_all = wanted.permissions().mode() & 0o555 == 0o555;
    let linked = is_for_all && from.canonicalize().and_then(|from| fs::hard_link(from, &new)).is_ok();
    if !linked {
        fs::copy(from, &new)?;
        fs::set_permissions(&new, Permissions::from_mode(0o755))?;
        File::options().write(true).open(&new)?.set_modified(wanted.modified()?)?;
    }
    fs::rename(new, to)
}

/// `name => path (address)`, line by line.
fn libraries_of(listed: &str) -> Vec<(String, String)> {
    let lines = listed.lines().filter_map(|line| line.trim().split_once(" => "));
    let named = lines.filter_map(|(name, rest)| Some((name.to_owned(), rest.rsplit_once(" (")?.0.to_owned())));
    named.filter(|(name, path)| !name.contains('/') && path.starts_with('/')).collect()
}

/// The loader that a program names; `None` for one that is linked statically.
fn interpreter(program: &Path) -> io::Result<Option<PathBuf>> {
    let mut file = File::open(program)?;
    let mut head = [0; 64];
    file.read_exact(&mut head)?;
    let wrong = || io::Error::other(format!("{} is no program for 64-bit little-endian Linux", program.display()));
    if head[..6] != *b"\x7fELF\x02\x01" {
        return Err(wrong());
    }
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    let (table, size, count) = (number(&head[32..40]), number(&head[54..56]), number(&head[56..58]));
    for entry in 0..count {
        let mut header = [0; 56];
        file.seek(SeekFrom::Start(table + entry * size))?;
        file.read_exact(&mut header)?;
        if number(&header[..4]) == u64::from(INTERPRETER) {
            let (offset, length) = (number(&header[8..16]), number(&header[32..40]));
            let mut path = vec![0; usize::try_from(length.min(4096)).map_err(io::Error::other)?];
            file.seek(SeekFrom::Start(offset))?;
            file.read_exact(&mut path)?;
            path.retain(|byte| *byte != 0);
            return Ok(Some(PathBuf::from(OsString::from_vec(path))));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_runs_from_the_folder_alone() {
        let folder = tempfile::tempdir().unwrap();
        let program = std::env::current_exe().unwrap();
        let command = furnish(folder.path(), &program).unwrap();
        // As the container sees it, with the folder in its place.
        let here = |word: &String| word.replace(INSIDE, &folder.path().display().to_string());
        let command: Vec<String> = command.iter().map(here).collect();
        let output = Command::new(&command[0]).args(&command[1..]).arg("--list").env_clear().output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // Once more costs nothing and says the same.
        assert_eq!(furnish(folder.path(), &program).unwrap().len(), command.len());
    }

    #[test]
    fn what_a_loader_lists_is_read_and_what_it_makes_up_is_left_out() {
        let listed = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x0000)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x0000)\n\tldd (0x0)\n";
        assert_eq!(libraries_of(listed), [("libc.so.6".to_owned(), "/lib/x86_64-linux-gnu/libc.so.6".to_owned())]);
    }
}
