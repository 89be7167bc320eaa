// The values under the pointer, in every chart at the same step; the arrow keys move it too.
const charts = [...document.querySelectorAll(".chart")].map((chart) => ({
  svg: chart.querySelector("svg"),
  cursor: chart.querySelector(".cursor"),
  step: chart.querySelector(".step"),
  lines: [...chart.querySelectorAll(".values")].map((line, i) => {
    const text = chart.querySelectorAll(".legend b")[i];
    const values = line.dataset.values.split(" ").map((pair) => pair.split(":"));
    return { xs: [...line.points].map((point) => point.x), values, text, last: text.textContent };
  }),
}));

const nearest = (xs, x) => xs.reduce((best, one, i) => (Math.abs(one - x) < Math.abs(xs[best] - x) ? i : best), 0);

function show(x) { // null: the last values again
  for (const { cursor, step, lines } of charts) {
    let at = -9;
    step.textContent = "";
    for (const { xs, values, text, last } of lines) {
      const i = nearest(xs, x), within = x !== null && xs[0] <= x && x <= xs[xs.length - 1];
      text.textContent = x === null ? last : within ? values[i][1] : "–";
      if (within) [at, step.textContent] = [xs[i], `step ${values[i][0]}`];
    }
    cursor.setAttribute("transform", `translate(${at})`);
  }
}

for (const { svg, lines } of charts) {
  const xs = [...new Set(lines.flatMap((line) => line.xs))].sort((a, b) => a - b);
  let place = xs.length - 1;
  const go = (to) => show(xs[(place = Math.min(xs.length - 1, Math.max(0, to)))]);
  svg.onpointermove = svg.onpointerdown = (event) => {
    const box = svg.getBoundingClientRect();
    go(nearest(xs, ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width));
  };
  svg.onpointerleave = (event) => event.pointerType === "mouse" && show(null);
  svg.onkeydown = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -xs.length, End: xs.length }[event.key];
    if (by) event.preventDefault(), go(place + by);
  };
}
