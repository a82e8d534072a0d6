//! What the cluster has of ours, kept current by two watches.
//!
//! The watches page their lists, resume from bookmarks and begin anew where the API server has forgotten them; what a new
//! list does not hold is then gone. Everything is under one lock that is never held across a wait.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::WatchStreamExt;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{Config, Event, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::facts::{JobFacts, PodFacts, Seen, judge};

/// How many objects one LIST brings.
const PAGE: u32 = 500;
/// How long a broken watch waits before it is tried again; longer each time.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// A watch that has gone well for so long begins with the shortest wait again.
const FORGOTTEN: Duration = Duration::from_secs(30);

/// What the cluster has of ours.
#[derive(Clone, Default)]
pub struct Observed {
    inside: Arc<Mutex<Inside>>,
}

#[derive(Default)]
struct Inside {
    entries: HashMap<String, Entry>,
    /// Counts the lists that have begun, of Jobs and of pods.
    lists: [u64; 2],
    synced: [bool; 2],
    changed: watch::Sender<()>,
}

/// One name of a Job.
struct Entry {
    job: JobState,
    pods: BTreeMap<String, (PodFacts, u64)>,
    started: bool,
    /// Tells whoever waits for this Job.
    changed: watch::Sender<()>,
}

/// What we know of the Job itself.
enum JobState {
    /// Nobody has seen one of this name.
    Unseen,
    /// There; last seen in, or created after the beginning of, this list.
    There(JobFacts, u64),
    /// There was one of this uid, and it was deleted.
    Deleted(String),
}

/// Which of the two watches.
#[derive(Clone, Copy)]
enum Kind {
    Jobs = 0,
    Pods = 1,
}

impl JobState {
    fn delete(&mut self) {
        if let Self::There(job, _) = self {
            *self = Self::Deleted(std::mem::take(&mut job.uid));
        }
    }
}

impl Entry {
    fn new() -> Self {
        Self { job: JobState::Unseen, pods: BTreeMap::new(), started: false, changed: watch::Sender::new(()) }
    }

    fn has_live_pod(&self) -> bool {
        self.pods.values().any(|(pod, _)| !pod.has_ended() && !pod.deleting)
    }

    fn is_idle(&self) -> bool {
        !matches!(self.job, JobState::There(..)) && self.pods.is_empty() && self.changed.receiver_count() == 0
    }
}

impl Observed {
    /// Starts both watches; they end with `tasks`.
    pub(super) fn watch(&self, jobs: Api<Job>, pods: Api<Pod>, selector: &str, tasks: &mut JoinSet<()>) {
        tasks.spawn(self.clone().follow(jobs, selector.to_owned()));
        tasks.spawn(self.clone().follow(pods, selector.to_owned()));
    }

    async fn follow<K: Seeable>(self, api: Api<K>, selector: String) {
        let kind = K::KIND;
        let config = Config { label_selector: Some(selector), page_size: Some(PAGE), ..Config::default() };
        let mut events = watcher(api, config).backoff(Doubling(BACKOFF.0, Instant::now())).boxed();
        let mut broken = false;
        let plural = K::plural(&());
        while let Some(event) = events.next().await {
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    if !broken {
                        tracing::warn!("the watch of {plural} broke and is tried again: {error}");
                    }
                    broken = true;
                    continue;
                }
            };
            // That a list begins is not yet a list.
            if !matches!(event, Event::Init) && std::mem::take(&mut broken) {
                tracing::info!("the watch of {plural} goes on");
            }
            match event {
                Event::Init => self.lock().lists[kind as usize] += 1,
                Event::InitApply(object) | Event::Apply(object) => {
                    let list = self.lock().lists[kind as usize];
                    object.see(&self, list);
                }
                Event::Delete(object) => object.see_deleted(&self),
                Event::InitDone => self.sweep(kind),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all that is there has been seen once.
    pub(super) async fn synced(&self) {
        let mut changed = self.lock().changed.subscribe();
        while !self.lock().synced.iter().all(|synced| *synced) {
            let _ = changed.changed().await;
        }
    }

    /// Where an attempt stands, by its Job's name; `extra` are pods that were asked for beside the watch, `given_up` is
    /// [`judge`]'s.
    pub(super) fn look(&self, name: &str, extra: &[PodFacts], begun: bool, given_up: bool) -> Seen {
        let inside = self.lock();
        let Some(entry) = inside.entries.get(name) else {
            return judge(None, extra.iter(), begun, given_up);
        };
        let job = match &entry.job {
            JobState::There(job, _) => Some(job),
            JobState::Unseen | JobState::Deleted(_) => None,
        };
        let known = entry.pods.values().map(|(pod, _)| pod);
        let extra = extra.iter().filter(|pod| !entry.pods.contains_key(&pod.name));
        let pods = known.chain(extra);
        let started = begun || entry.started || pods.clone().any(PodFacts::has_started);
        judge(job, pods, started, given_up)
    }

    /// The Job of this name, as long as it is there.
    pub(super) fn job(&self, name: &str) -> Option<JobFacts> {
        match &self.lock().entries.get(name)?.job {
            JobState::There(job, _) => Some(job.clone()),
            JobState::Unseen | JobState::Deleted(_) => None,
        }
    }

    /// The pods of a Job.
    pub(super) fn pods(&self, name: &str) -> Vec<PodFacts> {
        let inside = self.lock();
        let pods = inside.entries.get(name).into_iter().flat_map(|entry| entry.pods.values());
        pods.map(|(pod, _)| pod.clone()).collect()
    }

    /// True where nothing of this name is left that could run. A Job that has ended may still be there to be looked at.
    pub(super) fn is_over(&self, name: &str) -> bool {
        let inside = self.lock();
        let Some(entry) = inside.entries.get(name) else { return true };
        let may_start = matches!(&entry.job, JobState::There(job, _) if job.ended.is_none());
        !may_start && entry.pods.values().all(|(pod, _)| pod.has_ended())
    }

    /// Hears of every change of the Job of this name from now on.
    pub(super) fn subscribe(&self, name: &str) -> Subscription {
        let changed = self.lock().entries.entry(name.to_owned()).or_insert_with(Entry::new).changed.subscribe();
        Subscription { observed: self.clone(), name: name.to_owned(), changed: Some(changed) }
    }

    /// Changes what is known of one name, tells of it, and forgets it where nothing is left.
    fn change(&self, name: &str, change: impl FnOnce(&mut Entry) -> bool) {
        let mut inside = self.lock();
        let Some(entry) = inside.entries.get_mut(name) else { return };
        if change(entry) {
            entry.changed.send_replace(());
        }
        if entry.is_idle() {
            inside.entries.remove(name);
        }
    }

    /// Jobs that are there and have not ended, or have a pod that has not: whose.
    pub(super) fn unfinished(&self) -> Vec<(String, String)> {
        let inside = self.lock();
        let jobs = inside.entries.values().filter_map(|entry| match &entry.job {
            JobState::There(job, _) if !job.deleting && (job.ended.is_none() || entry.has_live_pod()) => Some(job),
            _ => None,
        });
        jobs.map(|job| (job.rollout_id.clone(), job.attempt_id.clone())).collect()
    }

    /// A Job that we have just made: the watch may be slower than our answer. One that was deleted meanwhile stays so.
    pub(super) fn note_created(&self, name: &str, job: JobFacts) {
        let mut inside = self.lock();
        let list = inside.lists[Kind::Jobs as usize];
        let entry = inside.entries.entry(name.to_owned()).or_insert_with(Entry::new);
        let known = match &entry.job {
            JobState::Unseen => false,
            JobState::There(..) => true,
            JobState::Deleted(uid) => *uid == job.uid,
        };
        if !known {
            entry.job = JobState::There(job, list);
        }
    }

    /// A list has ended: what it did not hold, and was not made since it began, is gone.
    fn sweep(&self, kind: Kind) {
        let mut inside = self.lock();
        let list = inside.lists[kind as usize];
        for entry in inside.entries.values_mut() {
            let gone = match kind {
                Kind::Jobs => {
                    let gone = matches!(entry.job, JobState::There(_, seen) if seen < list);
                    if gone {
                        entry.job.delete();
                    }
                    gone
                }
                Kind::Pods => {
                    let before = entry.pods.len();
                    entry.pods.retain(|_, (_, seen)| *seen >= list);
                    entry.pods.len() < before
                }
            };
            if gone {
                entry.changed.send_replace(());
            }
        }
        inside.entries.retain(|_, entry| !entry.is_idle());
        inside.synced[kind as usize] = true;
        inside.changed.send_replace(());
    }
}

/// What is watched.
trait Seeable: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static {
    const KIND: Kind;

    /// It is there, as the list of this number or a later change tells.
    fn see(&self, observed: &Observed, list: u64);

    /// It was deleted.
    fn see_deleted(&self, observed: &Observed);
}

impl Seeable for Job {
    const KIND: Kind = Kind::Jobs;

    fn see(&self, observed: &Observed, list: u64) {
        let Some(facts) = JobFacts::of(self) else { return };
        let mut inside = observed.lock();
        let entry = inside.entries.entry(self.name_any()).or_insert_with(Entry::new);
        let news = !matches!(&entry.job, JobState::There(known, _) if *known == facts);
        entry.job = JobState::There(facts, list);
        if news {
            entry.changed.send_replace(());
        }
    }

    fn see_deleted(&self, observed: &Observed) {
        observed.change(&self.name_any(), |entry| {
            entry.job.delete();
            true
        });
    }
}

impl Seeable for Pod {
    const KIND: Kind = Kind::Pods;

    fn see(&self, observed: &Observed, list: u64) {
        let Some(job) = job_of(self) else { return };
        let facts = PodFacts::of(self);
        let mut inside = observed.lock();
        let entry = inside.entries.entry(job.to_owned()).or_insert_with(Entry::new);
        entry.started |= facts.has_started();
        let before = entry.pods.insert(facts.name.clone(), (facts.clone(), list));
        if before.is_none_or(|(before, _)| before != facts) {
            entry.changed.send_replace(());
        }
    }

    fn see_deleted(&self, observed: &Observed) {
        let Some(job) = job_of(self) else { return };
        observed.change(job, |entry| entry.pods.remove(&self.name_any()).is_some());
    }
}

/// Hears of the changes of one name. What nobody hears of any more, and is gone, is forgotten.
pub(super) struct Subscription {
    observed: Observed,
    name: String,
    changed: Option<watch::Receiver<()>>,
}

impl Subscription {
    /// What has happened so far is known.
    pub(super) fn mark_unchanged(&mut self) {
        if let Some(changed) = &mut self.changed {
            changed.mark_unchanged();
        }
    }

    /// Waits for what happens next.
    pub(super) async fn changed(&mut self) {
        if let Some(changed) = &mut self.changed {
            let _ = changed.changed().await;
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.changed = None;
        self.observed.change(&self.name, |_| false);
    }
}

/// What is waited before the next try.
struct Doubling(Duration, Instant);

impl Iterator for Doubling {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let wait = self.0;
        self.0 = (wait * 2).min(BACKOFF.1);
        self.1 = Instant::now();
        Some(wait)
    }
}

impl Backoff for Doubling {
    /// Not at every event: the watcher tells that a list begins before it knows whether there will be one.
    fn reset(&mut self) {
        if self.1.elapsed() > FORGOTTEN {
            self.0 = BACKOFF.0;
        }
    }
}

/// The name of the Job that a pod belongs to.
fn job_of(pod: &Pod) -> Option<&str> {
    let labels = pod.metadata.labels.as_ref()?;
    labels.get("batch.kubernetes.io/job-name").or_else(|| labels.get("job-name")).map(String::as_str)
}

impl Debug for Observed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} jobs", self.lock().entries.len())
    }
}
