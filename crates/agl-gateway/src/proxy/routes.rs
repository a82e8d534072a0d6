//! Which model a call goes to. A harness may ask for several by name (a main model and a small one), and several agents may share
//! an attempt: a table in the configuration says which of them the policy is.

use crate::config::{GatewayConfig, RouteConfig};

/// Where a call goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// The registered model's name.
    pub(crate) model: String,
    /// It is the policy, which samples as the mode says.
    pub(crate) is_policy: bool,
    /// What the route says; `None` leaves it to the server's registration.
    pub(crate) trainable: Option<bool>,
}

/// The first route that fits. Without one the policy, or where the configuration lets harnesses choose, the model asked for.
pub(crate) fn target(config: &GatewayConfig, asked: Option<&str>, agent: Option<&str>) -> Target {
    let policy = &config.default_proxy.model_name;
    if let Some(route) = config.routes.iter().find(|route| fits(route, asked, agent)) {
        let model = route.to.clone();
        return Target { is_policy: model == *policy, model, trainable: route.trainable };
    }
    let chosen = asked.filter(|_| !config.default_proxy.override_model);
    let model = chosen.unwrap_or(policy).to_owned();
    Target { is_policy: model == *policy, model, trainable: None }
}

fn fits(route: &RouteConfig, asked: Option<&str>, agent: Option<&str>) -> bool {
    let fits = |pattern: &Option<String>, name: Option<&str>| {
        pattern.as_ref().is_none_or(|pattern| name.is_some_and(|name| is_like(pattern, name)))
    };
    fits(&route.model, asked) && fits(&route.agent, agent)
}

/// True if `name` is as `pattern` says, in which `*` stands for anything.
fn is_like(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(name) = name.strip_prefix(start) else { return false };
    // Wherever the rest of the pattern fits, it fits.
    (0..=name.len()).filter_map(|at| name.get(at..)).any(|tail| is_like(rest, tail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_anything() {
        for (pattern, name) in [("a", "a"), ("*", ""), ("claude-*haiku*", "claude-3-haiku-2024"), ("*é", "caffé")] {
            assert!(is_like(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("a", "ab"), ("a*b", "ac"), ("*x", "xy"), ("claude-*haiku", "claude-haiku-1")] {
            assert!(!is_like(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn the_first_route_that_fits_decides_by_model_and_agent() {
        let route = |model: Option<&str>, agent: Option<&str>, to: &str| RouteConfig {
            model: model.map(str::to_owned),
            agent: agent.map(str::to_owned),
            to: to.to_owned(),
            trainable: None,
        };
        let routes = vec![
            RouteConfig { trainable: Some(false), ..route(None, Some("critic"), "policy") },
            route(Some("*haiku*"), None, "small"),
        ];
        let config = GatewayConfig { routes, ..GatewayConfig::default() };
        let found = |asked, agent| {
            let Target { model, is_policy, trainable } = target(&config, asked, agent);
            (model, is_policy, trainable)
        };
        assert_eq!(found(Some("haiku"), Some("critic")), ("policy".to_owned(), true, Some(false)));
        assert_eq!(found(Some("claude-haiku"), None), ("small".to_owned(), false, None));
        assert_eq!(found(Some("claude-opus"), Some("coder")), ("policy".to_owned(), true, None));
        assert_eq!(found(None, None), ("policy".to_owned(), true, None));
    }
}
