// What the page shows (D, written by report/contents.py) and what its reader has chosen.

let D = JSON.parse(document.getElementById("data").textContent);
const [SERVED, ADAPTED] = D.stages.map((one) => one.name);
const state = {
  method: "",
  stage: SERVED,
  base: "",
  metric: "",
  client: -1,
  axis: "rounds",
  few: "",
  conflict: "",
  confused: "",
  sort: ["mean", -1],
  filter: "",
  shown: "both",
  others: false, // whether the names of grey methods are open
  whole: false, // whether a client's card lists every method
};
