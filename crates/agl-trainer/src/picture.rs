//! The reward curve as a picture.

use std::path::Path;

use plotters::prelude::*;

use crate::TrainerError;
use crate::metrics::StepMetrics;

const TRAIN: RGBColor = RGBColor(160, 174, 192);
const VALIDATION: RGBColor = RGBColor(190, 75, 40);
const FONT: &str = "sans-serif";

/// Draws training and validation reward over the steps as an SVG file.
///
/// # Errors
/// Where the file cannot be written.
pub fn reward_curve(path: &Path, title: &str, steps: &[StepMetrics]) -> Result<(), TrainerError> {
    let series = |name: &str| -> Vec<(f64, f64)> {
        steps.iter().filter_map(|step| Some((step.step as f64, step.get(name)?))).collect()
    };
    let (train, validation) = (series("reward/mean"), series("val/reward"));
    let points = || train.iter().chain(&validation);
    let last = points().map(|point| point.0).fold(1.0, f64::max);
    let low = points().map(|point| point.1).fold(0.0, f64::min);
    let high = points().map(|point| point.1).fold(1.0, f64::max);

    let draw = || -> Result<(), Box<dyn std::error::Error>> {
        let area = SVGBackend::new(path, (760, 400)).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(title, (FONT, 18))
            .margin(14)
            .x_label_area_size(38)
            .y_label_area_size(46)
            .build_cartesian_2d(0.0..last, low..high)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(BLACK.mix(0.08))
            .x_desc("training step")
            .y_desc("mean reward")
            .x_label_formatter(&|step| format!("{step:.0}"))
            .y_label_formatter(&|reward| format!("{reward:.1}"))
            .label_style((FONT, 13))
            .draw()?;
        chart
            .draw_series(LineSeries::new(train.iter().copied(), TRAIN.stroke_width(2)))?
            .label("training rollouts")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], TRAIN.stroke_width(2)));
        chart
            .draw_series(LineSeries::new(validation.iter().copied(), VALIDATION.stroke_width(3)).point_size(4))?
            .label("validation")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], VALIDATION.stroke_width(3)));
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .border_style(BLACK.mix(0.2))
            .background_style(WHITE)
            .label_font((FONT, 13))
            .draw()?;
        area.present()?;
        Ok(())
    };
    draw().map_err(|error| TrainerError::Picture { path: path.to_owned(), what: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picture_shows_both_curves_and_survives_a_run_without_steps() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("reward.svg");
        reward_curve(&path, "empty", &[]).unwrap();
        let mut steps = vec![StepMetrics::new(0), StepMetrics::new(1), StepMetrics::new(2)];
        steps[0].set("val/reward", 0.4);
        steps[1].set("reward/mean", 0.5);
        steps[2].set("reward/mean", 0.7);
        steps[2].set("val/reward", 0.9);
        reward_curve(&path, "calculator", &steps).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        assert!(svg.contains("calculator") && svg.contains("validation"));
        assert!(svg.matches("<polyline").count() >= 2, "a line each");
    }
}
