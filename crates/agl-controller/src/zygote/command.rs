//! Which commands can be started warm. Nothing here acts; it only looks at files.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::supervisor::record::Command;

/// What the interpreter is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `python script.py`
    Script,
    /// `python -m module`
    Module,
    /// `python -c code`
    Code,
}

impl Kind {
    /// The word that the zygote knows.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Script => "script",
            Self::Module => "module",
            Self::Code => "code",
        }
    }
}

/// A command line of Python, as far as a warm start can do the same.
#[derive(Debug, PartialEq, Eq)]
pub struct Invocation<'a> {
    /// What is run.
    pub kind: Kind,
    /// `-u`
    pub unbuffered: bool,
    /// The script, the module or the code, and behind it the arguments.
    pub words: &'a [String],
}

impl<'a> Invocation<'a> {
    /// Reads a command line whose first word is Python.
    ///
    /// # Errors
    /// What a forked interpreter cannot do.
    pub fn of(argv: &'a [String]) -> Result<Self, String> {
        let mut unbuffered = false;
        for (index, word) in argv.iter().enumerate().skip(1) {
            let kind = match word.as_str() {
                "-u" => {
                    unbuffered = true;
                    continue;
                }
                "-c" => Kind::Code,
                "-m" => Kind::Module,
                flag if flag.starts_with('-') => {
                    return Err(format!("of Python's flags only -u, -c and -m can be had warm, and it has {flag}"));
                }
                // Folders, archives and compiled files are run by other means.
                script if script.ends_with(".py") => Kind::Script,
                _ => return Err("only scripts named *.py can be started warm".to_owned()),
            };
            let words = &argv[index + usize::from(kind != Kind::Script)..];
            if words.is_empty() {
                break;
            }
            return Ok(Self { kind, unbuffered, words });
        }
        Err("it names nothing to run".to_owned())
    }
}

/// Why a command is started cold.
#[derive(Debug, PartialEq, Eq)]
pub enum Cold {
    /// It is no command of a Python.
    OtherProgram,
    /// It is, but not of the zygote's, or a forked interpreter could not be what it asks for.
    Because(String),
}

/// Decides whether a command can be started warm by a zygote of `python`.
///
/// # Errors
/// Why not.
pub fn check(command: &Command, python: &Interpreter) -> Result<(), Cold> {
    let path = command.env.get("PATH").map(OsString::from).or_else(|| std::env::var_os("PATH"));
    let program = command.argv.first().map(String::as_str).unwrap_or_default();
    if Interpreter::find(program, path.as_deref(), &command.cwd).as_ref() != Some(python) {
        let is_python = Path::new(program).file_name().is_some_and(|name| name.as_bytes().starts_with(b"python"));
        return Err(if is_python {
            Cold::Because(format!("its {program} is not the zygote's {python}"))
        } else {
            Cold::OtherProgram
        });
    }
    let invocation = Invocation::of(&command.argv).map_err(Cold::Because)?;
    // Python itself says best what is wrong with a script that is not there.
    if invocation.kind == Kind::Script && !command.cwd.join(&invocation.words[0]).is_file() {
        return Err(Cold::Because("its script does not exist".to_owned()));
    }
    match too_late(&command.env, |name| std::env::var_os(name)) {
        Some(name) => Err(Cold::Because(format!("it sets {name}, which an interpreter looks at only while it starts"))),
        None => Ok(()),
    }
}

/// A variable that would have to be there when the interpreter starts, and is not the same there.
fn too_late(env: &BTreeMap<String, String>, own: impl Fn(&str) -> Option<OsString>) -> Option<&str> {
    let is_early = |name: &str| match name {
        // These two can be made up for.
        "PYTHONPATH" => false,
        "PYTHONUNBUFFERED" => env[name].is_empty(),
        "LANG" | "LANGUAGE" | "GLIBC_TUNABLES" => true,
        name => ["PYTHON", "LD_", "LC_", "MALLOC_"].iter().any(|prefix| name.starts_with(prefix)),
    };
    env.iter()
        .map(|(name, value)| (name.as_str(), value))
        .find(|(name, value)| is_early(name) && own(name).as_deref() != Some(OsStr::new(value)))
        .map(|(name, _)| name)
}

/// A Python. Two names of it are the same where they are links of the same folder to the same file: a link to Python in
/// the folder of a virtual environment is another Python than its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interpreter {
    folder: PathBuf,
    file: PathBuf,
}

impl Interpreter {
    /// The program that would be run.
    #[must_use]
    pub fn find(program: &str, path: Option<&OsStr>, cwd: &Path) -> Option<Self> {
        let found = if program.contains('/') {
            cwd.join(program)
        } else {
            std::env::split_paths(path?).map(|folder| cwd.join(folder).join(program)).find(|file| file.is_file())?
        };
        Some(Self { folder: found.parent()?.canonicalize().ok()?, file: found.canonicalize().ok()? })
    }

    /// Whether it is a script that starts the interpreter, as pyenv's are. Such a script gives the interpreter another
    /// environment for every start.
    #[must_use]
    pub fn is_script(&self) -> bool {
        let mut beginning = [0; 2];
        File::open(&self.file).and_then(|mut file| file.read_exact(&mut beginning)).is_ok() && &beginning == b"#!"
    }
}

impl fmt::Display for Interpreter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.file.display().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn argv(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn scripts_modules_and_code_are_told_apart_from_their_arguments() {
        for (words, kind, unbuffered, rest) in [
            (&["python3", "run.py", "-c", "x"][..], Kind::Script, false, 3),
            (&["python3", "-u", "run.py"], Kind::Script, true, 1),
            (&["python3", "-m", "agent", "-u"], Kind::Module, false, 2),
            (&["python3", "-u", "-c", "pass", "-m"], Kind::Code, true, 2),
        ] {
            let argv = argv(words);
            let found = Invocation::of(&argv).unwrap();
            assert_eq!((found.kind, found.unbuffered, found.words.len()), (kind, unbuffered, rest), "{words:?}");
        }
    }

    #[test]
    fn what_a_forked_interpreter_cannot_be_is_named() {
        for (words, reason) in [
            (&["python3", "-I", "run.py"][..], "-I"),
            (&["python3", "-um", "agent"], "-um"),
            (&["python3", "-"], "- "),
            (&["python3", "agent.zip"], "*.py"),
            (&["python3"], "nothing to run"),
            (&["python3", "-c"], "nothing to run"),
        ] {
            let problem = Invocation::of(&argv(words)).unwrap_err() + " ";
            assert!(problem.contains(reason), "{problem}");
        }
    }

    #[test]
    fn variables_that_an_interpreter_reads_while_it_starts_must_be_those_of_the_zygote() {
        let own = |name: &str| (name == "LANG").then(|| OsString::from("C"));
        let env = |name: &str, value: &str| BTreeMap::from([(name.to_owned(), value.to_owned())]);
        assert_eq!(too_late(&env("LANG", "C"), own), None);
        assert_eq!(too_late(&env("LANG", "de_DE"), own), Some("LANG"));
        assert_eq!(too_late(&env("PYTHONHASHSEED", "0"), own), Some("PYTHONHASHSEED"));
        assert_eq!(too_late(&env("LD_PRELOAD", "x.so"), own), Some("LD_PRELOAD"));
        for name in ["PYTHONPATH", "PYTHONUNBUFFERED", "OPENAI_API_KEY"] {
            assert_eq!(too_late(&env(name, "1"), own), None);
        }
    }

    #[test]
    fn a_virtual_environments_python_is_another_one_than_the_python_it_links_to() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(at("usr")).unwrap();
        std::fs::create_dir_all(at("venv")).unwrap();
        std::fs::write(at("usr/python3.11"), "").unwrap();
        std::os::unix::fs::symlink("python3.11", at("usr/python3")).unwrap();
        std::os::unix::fs::symlink(at("usr/python3"), at("venv/python")).unwrap();
        std::os::unix::fs::symlink("python", at("venv/python3")).unwrap();
        let path = at("usr");
        let find = |program: &str| Interpreter::find(program, Some(path.as_os_str()), folder.path());
        assert_eq!(find("python3"), find("usr/python3.11"));
        assert_eq!(find("venv/python"), find("venv/python3"));
        assert_ne!(find("python3"), find("venv/python3"));
        assert_eq!(find("python4"), None);
        std::fs::write(at("usr/python2"), "#!/bin/sh\nexec python3 \"$@\"").unwrap();
        assert!(find("python2").unwrap().is_script() && !find("python3").unwrap().is_script());
    }
}
