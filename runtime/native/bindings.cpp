// Python's view of the kernels. Tensors come as addresses, so that no header of torch is needed: those take a minute to compile.
#include <pybind11/pybind11.h>

#include "kernels.h"

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
                               int64_t group, int bits, bool wide_scales) {
                 return smelt::Codes{at<uint8_t>(codes), at<void>(scales), at<uint8_t>(zeros), at<bf16>(bias), outputs,
                                     columns,            group,            bits,               wide_scales};
             }),
             "codes"_a, "scales"_a, "zeros"_a, "bias"_a, "outputs"_a, "columns"_a, "group"_a, "bits"_a, "wide_scales"_a);
    pybind11::class_<smelt::Norm>(module, "Norm")
        .def(pybind11::init([](Address weight, int64_t size, float eps, bool rounds_first) {
                 return smelt::Norm{at<float>(weight), size, eps, rounds_first};
             }),
             "weight"_a, "size"_a, "eps"_a, "rounds_first"_a);
    pybind11::class_<smelt::Cache>(module, "Cache")
        .def(pybind11::init([](Address keys, Address values, Address key_scales, Address value_scales, int64_t heads, int64_t size,
                               int64_t block, int kind) {
                 return smelt::Cache{at<void>(keys), at<void>(values), at<float>(key_scales), at<float>(value_scales), heads, size,
                                     block,          kind};
             }),
             "keys"_a, "values"_a, "key_scales"_a, "value_scales"_a, "heads"_a, "size"_a, "block"_a, "kind"_a);

    module.def(
        "linear_codes",
        [](const smelt::Codes& weight, Address x, int64_t rows, int64_t group, Address out, int threads) {
            smelt::linear_codes(weight, at<bf16>(x), rows, group, at<bf16>(out), threads);
        },
        Free());
    module.def(
        "linear_dense",
        [](Address weight, Address bias, Address x, int64_t rows, int64_t outputs, int64_t columns, Address out, int threads) {
            smelt::linear_dense(at<bf16>(weight), at<bf16>(bias), at<bf16>(x), rows, outputs, columns, at<bf16>(out), threads);
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
        "rotate_and_store",
        [](const smelt::Cache& cache, Address heads, int64_t tokens, int64_t query_heads, Address cosines, Address sines,
           int64_t half, Address slots, int threads) {
            smelt::rotate_and_store(cache, at<bf16>(heads), tokens, query_heads, at<bf16>(cosines), at<bf16>(sines), half,
                                    at<int64_t>(slots), threads);
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
           int64_t start, float scale, float cap, int64_t window, int threads) {
            smelt::attend_run(cache,
                              smelt::RunAttention{at<bf16>(queries), stride, heads, at<bf16>(out), at<int64_t>(table), tokens, start,
                                                  scale, cap, window},
                              threads);
        },
        Free());
}
