// Checks the results of hierarchical tree attention against float64, query by query.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "problems/htree_problem.h"

namespace htree_problem {

// Returns whether layer 1's selection is exactly the one that these importances call for,
// including ties.
inline bool selects_exactly(const Problem& p, int b, int t, const float* importance,
                            const int16_t* selected) {
  const int n = p.candidates(p.positions[p.token(b, t)], 1);
  std::vector<int> order(std::max(n - 1, 0));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](int i, int j) { return importance[i] > importance[j]; });
  order.resize(std::min<size_t>(order.size(), p.c.top_k - 1));
  if (n > 0) order.push_back(n - 1);
  std::sort(order.begin(), order.end());
  order.resize(p.c.top_k, -1);
  return std::equal(order.begin(), order.end(), selected);
}

struct Findings {
  double exact = 0,
         close = 0;  // error of the output against float64, without and with the kernel's roundings
  double lse = 0;
  double gap = 0;  // how far a candidate that was not selected exceeds one that was
  double importance = 0;
  bool partition = true, complete = true;

  // Rounding errors of scores grow with `size`, the scale of the queries. On a GPU, the
  // rounding of a rotated query may differ, since tensor cores add in another order.
  bool good(double size, bool tensor_cores = false) const {
    return partition && complete && gap < 2e-3 && close < 0.012 &&
           exact < 0.08 * std::max(1., size / 6) &&
           lse < 2e-3 * (tensor_cores ? std::max(1., size) : 1.) && importance < 2e-3;
  }
  void operator+=(const Findings& x) {
    for (auto field : {&Findings::exact, &Findings::close, &Findings::lse, &Findings::gap,
                       &Findings::importance}) {
      this->*field = std::max(this->*field, x.*field);
    }
    partition &= x.partition, complete &= x.complete;
  }
};

// Checks one query and KV head group. `selected` is [layers - 1, K]; `out`, `max_logit`
// and `log_sum` are those of the group's heads. The selection is taken as it is, if it is a valid
// one.
inline Findings check(const Problem& p, int b, int t, int g, const int16_t* selected,
                      const bf16* out, const float* max_logit, const float* log_sum,
                      const float* importance) {
  const Case& c = p.c;
  const int heads = c.heads / c.groups, position = p.positions[p.token(b, t)];
  Findings found;
  std::vector<std::vector<double>> score[2];  // [exact, close][candidate][head]
  std::vector<const float*> values;
  std::vector<int64_t> parents;
  int64_t span = 1, covered = 0;
  for (int l = 1; l < p.layers.count; ++l) span *= c.compression;
  for (int l = p.layers.count - 1; l >= 0; --l, span /= c.compression) {
    const int n = p.candidates(position, l);
    std::vector<int64_t> nodes(n);
    for (int i = 0; i < n; ++i) {
      nodes[i] = l + 1 == p.layers.count
                     ? i
                     : parents[i / c.compression] * c.compression + i % c.compression;
    }
    std::vector<bool> is_selected(n);
    parents.clear();
    if (l > 0) {
      const int16_t* row = selected + (l - 1) * c.top_k;
      const int count = std::min(n, c.top_k);
      for (int i = 0; i < c.top_k; ++i) {
        const bool good =
            i < count ? row[i] < n && row[i] >= 0 && (i == 0 || row[i] > row[i - 1]) : row[i] == -1;
        found.complete &= good;
        if (!good) return found;
        if (i < count) is_selected[row[i]] = true, parents.push_back(nodes[row[i]]);
      }
      if (n > 0) found.complete &= bool(is_selected[n - 1]);
    }
    double least = INFINITY,
           most = -INFINITY;  // least importance of a selected candidate, highest of the others
    const auto exact_queries = queries(p, b, t, g, n - 1, false);
    std::vector<std::vector<double>> close_queries;  // for the current block
    for (int i = 0; i < n; ++i) {
      const bool prefix = position / span < c.compression * c.top_k;
      if (i % c.compression == 0) {
        close_queries = queries(p, b, t, g, p.decodes ? 0 : n - 1 - (prefix ? 0 : i), true);
      }
      if (l > 0 && i == n - 1) continue;
      const float* key = &p.tree(b, g).k[l][nodes[i] * c.dim];
      const auto exact = scores(p, exact_queries, rotated(p, key, i, false));
      const int places = p.decodes ? i - (n - 1) : prefix ? i : i % c.compression;
      const auto close = scores(p, close_queries, rotated(p, key, places, true));
      if (l > 0) {
        const double peak = *std::max_element(close.begin(), close.end());
        double sum = 0;
        for (double x : close) sum += std::exp(x - peak);
        const double expected = std::max(peak + std::log(sum), -double{FLT_MAX} * std::log(2.));
        (is_selected[i] ? least : most) =
            is_selected[i] ? std::min(least, expected) : std::max(most, expected);
        if (l == 1 && importance) {
          found.importance =
              std::max(found.importance, error(importance[i] * std::log(2.), expected));
        }
      }
      if (is_selected[i]) continue;
      score[0].push_back(exact), score[1].push_back(close);
      values.push_back(&p.tree(b, g).v[l][nodes[i] * c.dim]);
      covered += l == 0 ? 1 : span;
    }
    found.gap = std::max(found.gap, most - least);
  }
  found.partition = covered == position + 1;

  for (int h = 0; h < heads; ++h) {
    for (int rounding = 0; rounding < 2; ++rounding) {
      double peak = -INFINITY, total = 0;
      for (const auto& s : score[rounding]) peak = std::max(peak, s[h]);
      std::vector<double> expected(c.dim);
      for (size_t i = 0; i < values.size(); ++i) {
        const double x = std::exp(score[rounding][i][h] - peak);
        total += x;
        for (int d = 0; d < c.dim; ++d) expected[d] += x * values[i][d];
      }
      double& worst = rounding == 0 ? found.exact : found.close;
      for (int d = 0; d < c.dim; ++d) {
        const double x = values.empty() ? 0 : expected[d] / total;
        const double off = error(__bfloat162float(out[h * c.dim + d]), x);
        worst = std::max(worst, off / std::max(1., std::fabs(x)));
      }
      if (rounding == 1) {
        if (values.empty()) {
          if (max_logit[h] != -INFINITY || log_sum[h] != 0.f) found.lse = INFINITY;
          continue;
        }
        const double above = peak == max_logit[h] ? 0 : peak - max_logit[h];
        found.lse = std::max(found.lse, error(log_sum[h], above + std::log(total)));
      }
    }
  }
  return found;
}

}  // namespace htree_problem
