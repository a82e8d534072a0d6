//! What the first process may do while it puts up the walls, and what it gives up for good before it starts the agent.

use std::collections::BTreeMap;

use nix::libc;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, configure_capability_in_ambient_set,
    remove_capability_from_bounding_set, set_capabilities,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

/// Kinds of sockets that namespaces hold in. Others may lead out: vsock, from a virtual machine to its host.
const SOCKETS: [i32; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// Calls that agents hardly need, and that go round the filter, or reach what no namespace divides.
const CALLS: [i64; 9] = [
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
];

/// Makes what the first process needs to put up walls outlive its start: only root keeps capabilities by itself.
///
/// # Errors
/// What could not be handed on.
pub fn hand_on() -> Result<(), String> {
    let fault = |error: rustix::io::Errno| format!("cannot hand its capabilities on: {error}");
    let needed = [CapabilitySet::SYS_ADMIN, CapabilitySet::SETPCAP];
    let own = capabilities(None).map_err(fault)?;
    let inheritable = needed.into_iter().collect();
    set_capabilities(None, CapabilitySets { inheritable, ..own }).map_err(fault)?;
    needed.into_iter().try_for_each(|one| configure_capability_in_ambient_set(one, true)).map_err(fault)
}

/// Gives up all capabilities and all ways to regain them, then the calls.
///
/// # Errors
/// What could not be given up.
pub fn give_up() -> Result<(), String> {
    let fault = |what: &'static str| move |error: rustix::io::Errno| format!("cannot {what}: {error}");
    rustix::thread::set_no_new_privs(true).map_err(fault("give up new privileges"))?;
    for bit in 0..u64::BITS {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << bit)) {
            Ok(()) => {}
            // The kernel knows no more of them.
            Err(rustix::io::Errno::INVAL) => break,
            Err(error) => return Err(fault("bound its capabilities")(error)),
        }
    }
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
        .map_err(fault("give up its capabilities"))?;
    let filter = filter().map_err(|error| format!("cannot make its filter of system calls: {error}"))?;
    seccompiler::apply_filter(&filter).map_err(|error| format!("cannot set its filter of system calls: {error}"))
}

fn filter() -> Result<BpfProgram, seccompiler::BackendError> {
    let other = SOCKETS
        .iter()
        .map(|family| SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, *family as u64))
        .collect::<Result<_, _>>()?;
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = CALLS.map(|call| (call, Vec::new())).into();
    rules.insert(libc::SYS_socket, vec![SeccompRule::new(other)?]);
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, std::env::consts::ARCH.try_into()?)?;
    let mut program: BpfProgram = filter.try_into()?;
    if cfg!(target_arch = "x86_64") {
        // The x32 numbers of the same calls are the same architecture to the kernel. Behind the three instructions that
        // look at the architecture; jumps are relative.
        let instruction = |code, jt, jf, k| seccompiler::sock_filter { code, jt, jf, k };
        program.splice(
            3..3,
            [
                instruction(0x20, 0, 0, 0),           // the number of the call
                instruction(0x35, 0, 1, 0x4000_0000), // is it one of x32?
                instruction(0x06, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
            ],
        );
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_filter_can_be_made_on_this_architecture() {
        super::filter().unwrap();
    }
}
