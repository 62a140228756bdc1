// Python's view of the kernels. Tensors come as addresses, so that no header of torch is needed: those take a minute to compile.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "kernels.h"
#include "threads.h"

PYBIND11_MAKE_OPAQUE(std::vector<smelt::Layer>)
PYBIND11_MAKE_OPAQUE(std::vector<smelt::Cache>)

namespace {

using smelt::bf16;
using Address = uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    using namespace pybind11::literals;
    using Free = pybind11::call_guard<pybind11::gil_scoped_release>;

    pybind11::class_<smelt::Codes>(module, "Codes")
        .def(pybind11::init([](Address codes, Address scales, Address zeros, Address bias, int64_t outputs, int64_t columns,
                               int64_t group, int bits, bool wide_scales, float input_scale,
                               Address lower, bool upper) {
                 return smelt::Codes{at<uint8_t>(codes), at<uint8_t>(lower), at<void>(scales), at<uint8_t>(zeros), at<bf16>(bias), outputs,
                                     columns,            group,            bits,               upper,       wide_scales,        input_scale};
             }),
             "codes"_a, "scales"_a, "zeros"_a, "bias"_a, "outputs"_a, "columns"_a, "group"_a, "bits"_a, "wide_scales"_a,
             "input_scale"_a = 0.0f, "lower"_a = 0, "upper"_a = false);
    pybind11::class_<smelt::Norm>(module, "Norm")
        .def(pybind11::init([](Address weight, int64_t size, float eps, bool rounds_first) {
                 return smelt::Norm{at<float>(weight), size, eps, rounds_first};
             }),
             "weight"_a, "size"_a, "eps"_a, "rounds_first"_a);
    pybind11::class_<smelt::Cache>(module, "Cache")
        .def(pybind11::init([](Address keys, Address values, Address key_scales, Address value_scales, int64_t heads, int64_t size,
                               int64_t block, int kind, Address key_rule, Address value_rule, float half, float least, float most) {
                 return smelt::Cache{at<void>(keys), at<void>(values), at<float>(key_scales), at<float>(value_scales), heads, size,
                                     block,          kind,             {at<float>(key_rule), at<float>(value_rule), half, least, most}};
             }),
             "keys"_a, "values"_a, "key_scales"_a, "value_scales"_a, "heads"_a, "size"_a, "block"_a, "kind"_a,
             "key_rule"_a = 0, "value_rule"_a = 0, "half"_a = 0.0f, "least"_a = 0.0f, "most"_a = 0.0f);

    pybind11::class_<smelt::Linear>(module, "Linear")
        .def_static(
            "of_codes",
            [](const smelt::Codes& codes, int64_t group, int64_t exact_rows) {
                return smelt::Linear{codes, group, exact_rows, nullptr, nullptr, codes.outputs, codes.columns};
            },
            "codes"_a, "group"_a, "exact_rows"_a)
        .def_static(
            "of_dense",
            [](Address weight, Address bias, int64_t outputs, int64_t columns) {
                return smelt::Linear{std::nullopt, 0, 0, at<bf16>(weight), at<bf16>(bias), outputs, columns};
            },
            "weight"_a, "bias"_a, "outputs"_a, "columns"_a);
    pybind11::class_<smelt::Layer>(module, "Layer")
        .def(pybind11::init([](std::optional<smelt::Norm> before_attention, std::optional<smelt::Norm> query_norm,
                               std::optional<smelt::Norm> key_norm, std::optional<smelt::Norm> after_attention,
                               std::optional<smelt::Norm> before_mlp, std::optional<smelt::Norm> after_mlp,
                               std::optional<smelt::Linear> query_key_value, std::optional<smelt::Linear> out,
                               std::optional<smelt::Linear> gate_up, std::optional<smelt::Linear> down, int64_t heads, int64_t window, float scale, float cap, int activation,
                               int rope) {
                 return smelt::Layer{before_attention, query_norm, key_norm, after_attention, before_mlp, after_mlp,
                                     query_key_value,  out,        gate_up,  down,            heads,      window,
                                     scale,            cap,        activation, rope};
             }),
             "before_attention"_a, "query_norm"_a, "key_norm"_a, "after_attention"_a, "before_mlp"_a, "after_mlp"_a,
             "query_key_value"_a, "out"_a, "gate_up"_a, "down"_a, "heads"_a, "window"_a, "scale"_a, "cap"_a, "activation"_a,
             "rope"_a);
    pybind11::class_<std::vector<smelt::Layer>>(module, "Layers").def(pybind11::init([](const pybind11::list& each) {
        std::vector<smelt::Layer> found;
        for (const auto& layer : each) found.push_back(layer.cast<smelt::Layer>());
        return found;
    }));
    pybind11::class_<std::vector<smelt::Cache>>(module, "Caches").def(pybind11::init([](const pybind11::list& each) {
        std::vector<smelt::Cache> found;
        for (const auto& cache : each) found.push_back(cache.cast<smelt::Cache>());
        return found;
    }));

    module.def(
        "decode",
        [](const std::vector<smelt::Layer>& layers, const std::vector<smelt::Cache>& caches, Address hidden, int64_t rows,
           int64_t width, const pybind11::list& rotations, Address slots, Address also_rows, Address also_slots, int64_t also,
           Address order, Address tables, Address stops, int64_t table_width,
           const std::vector<std::pair<int64_t, Address>>& places, int64_t stride, int threads) {
            std::vector<smelt::Taken> taken;
            for (const auto& [layer, place] : places) taken.push_back({layer, at<bf16>(place), stride});
            std::vector<smelt::Rotation> rotated;
            for (const auto& one : rotations) {
                const auto each = one.cast<pybind11::tuple>();
                rotated.push_back({at<bf16>(each[0].cast<Address>()), at<bf16>(each[1].cast<Address>()), each[2].cast<int64_t>()});
            }
            const pybind11::gil_scoped_release free;
            smelt::decode(layers, caches, at<bf16>(hidden), rows, width, rotated,
                          {at<int64_t>(slots), at<int64_t>(also_rows), at<int64_t>(also_slots), also}, at<int64_t>(order),
                          at<int64_t>(tables), at<int64_t>(stops), table_width, taken, threads);
        });
    module.def(
        "linear",
        [](const smelt::Linear& weight, Address x, int64_t rows, Address out, int threads) {
            smelt::linear(weight, at<bf16>(x), rows, at<bf16>(out), threads);
        },
        Free());
    pybind11::class_<smelt::Threads>(module, "Threads")
        .def(pybind11::init())
        .def("count", &smelt::Threads::count, "most"_a, "at"_a)
        .def("seen", &smelt::Threads::seen, "most"_a, "threads"_a, "count"_a, "piece"_a, "mine"_a, "busy"_a, "time"_a, "at"_a);
    module.def("use_tiles", smelt::use_tiles, "dense"_a);
    module.def("tiles_are_used", smelt::tiles_are_used);
    module.def("dense_tiles_are_used", smelt::dense_tiles_are_used);
    module.def(
        "dense_tiles",
        [](const smelt::Linear& w, Address x, int64_t rows, Address out, int threads) {
            smelt::dense_tiles(w.dense, w.bias, at<bf16>(x), rows, w.outputs, w.columns, at<bf16>(out), threads);
        },
        Free());
    module.def(
        "linear_tiles",
        [](const smelt::Linear& weight, Address x, int64_t rows, Address out, int threads) {
            const bool taken = weight.codes && smelt::tiles_take(weight.group);
            if (taken) smelt::linear_tiles(*weight.codes, at<bf16>(x), rows, weight.group, at<bf16>(out), threads);
            return taken;
        },
        Free());
    module.def(
        "rms_norm",
        [](const smelt::Norm& norm, Address x, int64_t stride, Address out, int64_t out_stride, int64_t rows, int64_t heads,
           int threads) { smelt::rms_norm(norm, at<bf16>(x), stride, at<bf16>(out), out_stride, rows, heads, threads); },
        Free());
    module.def(
        "gate",
        [](int activation, Address x, int64_t rows, int64_t size, Address out, int threads) {
            smelt::gate(activation, at<bf16>(x), rows, size, at<bf16>(out), threads);
        },
        Free());
    module.def(
        "add",
        [](Address a, Address b, int64_t count, Address out, int threads) {
            smelt::add(at<bf16>(a), at<bf16>(b), count, at<bf16>(out), threads);
        },
        Free());
    module.def(
        "to_float32",
        [](Address values, int64_t count, Address out, int threads) { smelt::to_float32(at<bf16>(values), count, at<float>(out), threads); },
        Free());
    module.def(
        "logit_statistics",
        [](Address logits, int64_t rows, int64_t size, int threads) {
            std::vector<int64_t> best(rows);
            std::vector<float> highest(rows), total(rows);
            {
                const pybind11::gil_scoped_release free;
                smelt::logit_statistics(at<float>(logits), rows, size, best.data(), highest.data(), total.data(), threads);
            }
            return pybind11::make_tuple(best, highest, total);
        });
    module.attr("SHARED_MARK") = smelt::kSharedMark;
    pybind11::class_<smelt::Shared>(module, "Shared")
        .def(pybind11::init([](Address memory, int rank, int count, int64_t room) {
            return smelt::Shared{at<uint8_t>(memory), rank, count, room};
        }));
    module.def(
        "share_part",
        [](const smelt::Shared& shared, uint64_t turn, Address values, int64_t bytes) {
            smelt::share_part(shared, turn, at<void>(values), bytes);
        },
        Free());
    module.def(
        "sum_parts",
        [](const smelt::Shared& shared, uint64_t turn, Address out, int64_t count, bool wide, int64_t patience) {
            return smelt::sum_parts(shared, turn, at<void>(out), count, wide, patience);
        },
        Free());
    module.def("draw_tokens", [](const pybind11::list& asked, int threads) {
        std::vector<smelt::Draw> draws;
        for (const auto& one : asked) {
            const auto each = one.cast<pybind11::tuple>();
            draws.push_back({at<float>(each[0].cast<Address>()), each[1].cast<int64_t>(), each[2].cast<float>(), each[3].cast<int64_t>(),
                             each[4].cast<float>(), each[5].cast<float>(), each[6].cast<uint64_t>(), each[7].cast<uint32_t>(),
                             each[8].cast<int64_t>()});
        }
        std::vector<std::vector<smelt::Ranked>> found(draws.size());
        {
            const pybind11::gil_scoped_release free;
            smelt::draw_tokens(draws, found.data(), threads);
        }
        pybind11::list ranked;
        for (const auto& row : found) {
            pybind11::list tokens;
            for (const auto& each : row) tokens.append(pybind11::make_tuple(each.id, each.value));
            ranked.append(tokens);
        }
        return ranked;
    });
    module.def(
        "rotate_and_store",
        [](const smelt::Cache& cache, Address heads, int64_t tokens, int64_t query_heads, Address cosines, Address sines,
           int64_t half, Address slots, Address also_rows, Address also_slots, int64_t also, int threads) {
            smelt::rotate_and_store(cache, at<bf16>(heads), tokens, query_heads, at<bf16>(cosines), at<bf16>(sines), half,
                                    {at<int64_t>(slots), at<int64_t>(also_rows), at<int64_t>(also_slots), also}, threads);
        },
        Free());
    module.def(
        "attend",
        [](const smelt::Cache& cache, Address queries, int64_t stride, int64_t heads, Address out, Address rows, Address tables,
           Address stops, int64_t tokens, int64_t table_width, float scale, float cap, int64_t window, int threads) {
            smelt::attend(cache,
                          smelt::Attention{at<bf16>(queries), stride, heads, at<bf16>(out), at<int64_t>(rows), at<int64_t>(tables),
                                           at<int64_t>(stops), tokens, table_width, scale, cap, window},
                          threads);
        },
        Free());
    module.def(
        "attend_run",
        [](const smelt::Cache& cache, Address queries, int64_t stride, int64_t heads, Address out, Address table, int64_t tokens,
           int64_t start, float scale, float cap, int64_t window, bool tiles, int threads) {
            smelt::attend_run(cache,
                              smelt::RunAttention{at<bf16>(queries), stride, heads, at<bf16>(out), at<int64_t>(table), tokens, start,
                                                  scale, cap, window, tiles},
                              threads);
        },
        Free());
}
