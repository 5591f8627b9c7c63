// The table of answers.md: fetches results/answers.json, and shows the rows that match the filters above it.
"use strict";

(() => {
  const NUMBER = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
  const CHOICES = [  // [column, label, its first value]
    ["family", "models for", "all"], ["hosts", "hosts", "8"], ["gbps", "Gbit/s", "10"],
    ["accelerator", "accelerator on each", "v100"]];

  const COLUMNS = [  // [title, explanation, value to sort by, text]
    ["model", "hover for its source", row => row.name, row => row.name],
    ["weights", "millions that are trained", row => row.parameters, row => `${NUMBER.format(row.parameters / 1e6)}M`],
    ["rows", "of a batch, on each host", row => row.batch_size, row => NUMBER.format(row.batch_size)],
    ["speed-up", "over one process; the bar is full where hosts lose nothing", row => row.speed_up,
      row => NUMBER.format(row.speed_up)],
    ["at most", "by any choice of schemes", row => row.at_most, row => NUMBER.format(row.at_most)],
    ["all-reduce", "the speed-up by rings over dense gradients", row => row.all_reduce,
      row => NUMBER.format(row.all_reduce)],
    ["step", "", row => row.step_seconds, row => duration(row.step_seconds)],
    ["a node's bytes", "sent plus received in a step", row => row.num_bytes ?? 0,
      row => row.num_bytes === null ? "unknown" : size(row.num_bytes)],
    ["gradients travel", "shares of the weights' bytes", row => Object.keys(row.shares)[0],
      row => Object.entries(row.shares).filter(([, share]) => share >= 0.005)
        .map(([scheme, share]) => `${scheme} ${Math.round(100 * share)}\u00a0%`).join(", ")],
    ["memory of a rank", "weights, gradients and the slots of Adam; without activations",
      row => row.weights + row.gradients + row.slots, row => size(row.weights + row.gradients + row.slots)],
  ];

  function duration(seconds) {
    return seconds >= 1 ? `${NUMBER.format(seconds)} s` : `${NUMBER.format(1e3 * seconds)} ms`;
  }

  function size(bytes) {
    const [divisor, unit] = bytes >= 1e9 ? [1e9, "GB"] : bytes >= 1e6 ? [1e6, "MB"] : [1e3, "kB"];
    return `${NUMBER.format(bytes / divisor)} ${unit}`;
  }

  function element(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  function flattened(stored) {
    return stored.models.flatMap(({ rows, ...model }) => rows.map(
      cells => ({ ...model, ...Object.fromEntries(stored.columns.map((name, i) => [name, cells[i]])) })));
  }

  function cell([title, , , text], row) {
    const made = element("td", { textContent: text(row) });
    if (title === "model") made.title = row.source;
    if (title === "speed-up") {
      const percent = Math.min(100, 100 * row.speed_up / row.hosts);
      made.className = "answers-bar";
      made.style.setProperty("--part", `${percent}%`);
      if (row.speed_up < 1) made.classList.add("answers-slower");
    }
    return made;
  }

  function show(container, rows) {
    let sorted = 3, ascending = false;
    const body = element("tbody"), filters = element("p", { className: "answers-filters" });
    const search = element("input", { type: "search", placeholder: "name of a model", ariaLabel: "name of a model" });
    const chosen = CHOICES.map(([column, label, first]) => {
      const select = element("select", { ariaLabel: label });
      const values = [...new Set(rows.map(row => String(row[column])))];
      for (const value of column === "family" ? ["all", ...values] : values) {
        select.append(element("option", { value, textContent: value, selected: value === first }));
      }
      filters.append(element("label", {}, `${label} `, select));
      return [column, select];
    });
    filters.append(search);

    function update() {
      const found = rows.filter(row => chosen.every(([column, select]) => select.value === "all"
          || String(row[column]) === select.value) && row.name.toLowerCase().includes(search.value.toLowerCase()));
      const value = COLUMNS[sorted][2];
      found.sort((a, b) => (ascending ? 1 : -1) * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
      body.replaceChildren(...found.map(row => element("tr", {}, ...COLUMNS.map(column => cell(column, row)))));
    }

    const head = element("tr", {}, ...COLUMNS.map(([textContent, title], number) => {
      const button = element("button", { textContent, title });
      button.addEventListener("click", () => {
        [sorted, ascending] = [number, number === sorted ? !ascending : number === 0];
        update();
      });
      return element("th", {}, button);
    }));
    for (const input of [search, ...chosen.map(([, select]) => select)]) input.addEventListener("input", update);
    container.replaceChildren(filters, element("div", { className: "answers-table" },
      element("table", {}, element("thead", {}, head), body)));
    update();
  }

  const container = document.getElementById("answers");
  if (container) {
    fetch(container.dataset.file).then(response => response.json()).then(stored => show(container, flattened(stored)))
      .catch(error => { container.textContent = `The table cannot be shown: ${error.message}.`; });
  }
})();
